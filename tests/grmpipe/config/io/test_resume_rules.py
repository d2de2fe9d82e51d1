"""Which keys a resume may change: none that changes a sample, a verdict, or what is made of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from configs import run_config

from grmpipe.config.io.resume_rules import (
    FREE_ON_RESUME,
    START_KEYS,
    ConfigChange,
    changes_on_resume,
    find_changed_keys,
    free_on_resume,
)
from grmpipe.config.run_sections import RunSections
from grmpipe.config.tracking import TrackingConfig
from grmpipe.trackers.wandb_tracker import WandbConfig

FREE = (
    "train.num_steps", "train.checkpoint_every", "train.lr", "train.schedule", "judge.limits.timeout_s",
    "judge.max_failure_rate", "rollout.pause_s", "judge.limits.max_retries", "rollout.group_deadline_s",
    "judge_monitor.limits", "engine.vllm.gpu_memory_utilization", "critic.lr", "grm.train.lr",
    "train.parallel.cp", "grm.train.parallel.ep", "models.safety.train.parallel.cp", "critic.parallel.dp_replicate",
)  # fmt: skip
BOUND = (
    "task", "seed", "experiment_name", "policy.path", "policy.dtype", "policy.chat_template", "policy.lora.rank",
    "grm.path", "meta_rm.path",
    "judge.kind", "judge.template", "judge.num_judgements", "judge.max_new_tokens", "judge.temperature",
    "judge.parser", "judge.vote", "judge.scale.high", "judge.format.truncation", "judge.early_stop.kind", "judge.rule",
    "data.labels.rule", "data.path", "data.shuffle", "data.num_eval_prompts", "env.kind", "rollout.max_new_tokens",
    "rollout.temperature", "rollout.max_turns", "algorithm.loss", "algorithm.clip_low",
    "train.group_size", "train.groups_per_batch", "train.max_staleness", "train.dtype", "train.optimizer.weight_decay",
    "train.optimizer.betas", "critic.enabled", "grm.train.enabled", "engine.vllm.max_context_tokens",
    "engine.openai.extra_body.model", "data.rft.num_samples",
)  # fmt: skip


def keys_of(value: object, path: str = "") -> Iterator[str]:
    if path:
        yield path
    if dataclasses.is_dataclass(value):
        for spec in dataclasses.fields(value):
            yield from keys_of(getattr(value, spec.name), f"{path}.{spec.name}" if path else spec.name)


@pytest.mark.parametrize("key", FREE)
def test_keys_that_change_no_sample_may_change_on_resume(key: str) -> None:
    assert free_on_resume(key)


@pytest.mark.parametrize("key", BOUND)
def test_keys_that_change_a_sample_a_verdict_or_its_use_may_not_change_on_resume(key: str) -> None:
    assert not free_on_resume(key)


def test_every_free_key_is_a_key() -> None:
    assert set(FREE_ON_RESUME) <= set(keys_of(RunSections()))


def test_the_page_names_what_a_resume_may_change_by_keys_that_are_free() -> None:
    page = (Path(__file__).parents[4] / "docs" / "checkpoints.md").read_text()
    rows = page.partition("| may change | keys |")[2].partition("\n\n")[0]
    named = {key.removesuffix("*") for key in re.findall(r"`([\w.*]+)`", rows)} - {"engine_options"}  # of any role
    known = set(keys_of(RunSections()))
    assert {key for key in named if not any(other.startswith(key) for other in known)} == set()
    assert {key for key in named if not key.endswith("_") and not free_on_resume(key)} == set()
    shown = {free for free in FREE_ON_RESUME if any(free.startswith(key) for key in named)}
    assert set(FREE_ON_RESUME) - shown == set(START_KEYS)


def test_change_of_a_run_is_reported_without_secrets_and_its_name_is_no_change() -> None:
    old = run_config()
    tags = TrackingConfig(wandb=WandbConfig(tags=["a"], project="p"))
    new = dataclasses.replace(old, resume="auto", run_dir="x", tracking=tags)
    told = changes_on_resume(old, new)
    assert ConfigChange(key="tracking.wandb.project", old="grmpipe", new="p") in told
    assert {change.key for change in told} == {"tracking.wandb.project", "tracking.wandb.tags"}
    assert find_changed_keys(old, new) == []
