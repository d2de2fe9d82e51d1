"""task=plan: told without GPUs, without the models, and without starting anything."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import launch  # noqa: F401  registers the schema
from grmpipe.config import ConfigError, RunConfig, build
from grmpipe.plan import memory_parts, overfull_slots, plan, survey_run

ROOT = Path(__file__).parents[2]


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", list(overrides)))


def planned(*overrides: str) -> str:
    return plan(composed(*overrides), lambda what, share: None)


@pytest.fixture
def big_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The eight-GPU recipe with a file of prompts."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no_cache"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + 1?"}) + "\n" for n in range(100)))
    monkeypatch.chdir(tmp_path)
    return ("+experiment=qwen3_8b", "data.path=prompts.jsonl")


def test_the_quickstarts_plan_says_places_memory_and_batches() -> None:
    text = planned("+experiment=quickstart")
    assert "train 0    cpu       policy-0 (50%), learner-0 (50%)" in text
    assert "16 groups x 8 siblings = 128 rollouts, at most 8192 tokens" in text
    assert "128 rollouts x 1 judgements = 128 judgements" in text
    assert "in flight: at most 32 groups, 256 rollouts" in text
    assert "weights, gradients and moments over 1 rank" in text
    assert "not checked here" not in text


def test_the_recipe_for_one_gpu_fits_it(big_run: tuple[str, ...]) -> None:
    text = planned("+experiment=qwen3_one_gpu", *big_run[1:])
    assert "all 0  gpu       policy-0 (33%), learner-0 (33%), grm-0 (33%)" in text
    assert "1.19 GB  weights" in text  # 5.96e8 parameters in bfloat16, the head tied
    assert "warnings" not in text


def test_a_run_for_eight_gpus_is_planned_without_gpu_and_models(big_run: tuple[str, ...], tmp_path: Path) -> None:
    began_s = time.monotonic()
    text = planned(*big_run)
    assert time.monotonic() - began_s < 30
    for line in ("train 3    gpu       learner-3", "rollout 1  gpu       policy-1", "judging 1  gpu       grm-1"):
        assert line in text
    assert "16.4 GB  weights" in text  # 8.19e9 parameters in bfloat16
    assert "32.8 GB  weights, gradients and moments over 4 ranks" in text  # 16 bytes each, in 4 shards
    unchecked = text.split("not checked here")[1]
    assert "hf download Qwen/Qwen3-8B" in unchecked
    assert "hf download Qwen/Qwen3-14B" in unchecked
    assert "placement.pools.train: wants 4 gpu slots" in unchecked
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_the_recipe_for_eight_gpus_fits_them_and_a_larger_batch_does_not(big_run: tuple[str, ...]) -> None:
    assert "warnings" not in planned(*big_run)
    text = planned(*big_run, "train.micro_batch_tokens=65536", "engine.embedded.max_batch_rows=64")
    assert "train 0: learner-0 may want" in text
    assert "lower train.micro_batch_tokens" in text
    assert "judging 1: grm-1 may want" in text
    assert "lower engine.embedded.max_batch_rows" in text


def test_engines_are_told_with_the_options_that_differ_from_their_defaults() -> None:
    text = planned("+experiment=quickstart_vllm", "grm.engine=embedded", "engine.embedded.max_batch_rows=64")
    assert "  policy   vllm; kv_cache_mb=64\n  grm      embedded; max_batch_rows=64" in text
    assert "67.1 MB  KV, engine.vllm.kv_cache_mb: 87381 tokens" in text  # 64 MiB of 768 bytes
    assert "engines\n  policy   embedded; default options" in planned("+experiment=quickstart")


def test_an_engine_over_two_gpus_holds_half_the_weights_on_each(big_run: tuple[str, ...]) -> None:
    text = planned(*big_run, "engine=vllm", "placement=four_gpus", "grm.engine=embedded")
    assert "policy   vllm, tensor parallel over 2 GPUs; default options" in text
    assert "rollout 1  gpu       policy-0" in text
    assert "8.19 GB  weights, over 2 GPUs" in text
    # 0.85 x 80 GB less half of 16.38 GB of weights, of two such GPUs; 147456 bytes a token.
    assert "59.8 GB  KV, what is left of engine.vllm.gpu_memory_utilization=0.85: 811215 tokens" in text


def test_heads_that_gpus_cannot_share_are_refused_by_their_declared_number(big_run: tuple[str, ...]) -> None:
    odd = ("placement.pools.rollout.slots=3", "placement.roles.policy.slots_per_replica=3")
    with pytest.raises(ConfigError, match=r"^placement\.roles\.policy\.slots_per_replica: 3 GPUs can't share 32"):
        planned(*big_run, "engine=vllm", "placement=four_gpus", *odd)


def test_a_judge_outside_is_planned_with_its_judgements_and_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    text = planned("+experiment=quickstart", "grm.engine=openai", "grm.path=a-judge")
    assert "grm      openai: a-judge at https://api.openai.com/v1; default options" in text
    assert "128 rollouts x 1 judgements = 128 judgements" in text
    assert "grm-0" not in text
    assert "OPENAI_API_KEY is not set" in text.split("not checked here")[1]


def test_roles_that_crowd_one_gpu_are_told_apart(big_run: tuple[str, ...]) -> None:
    config = composed(*big_run, "placement.roles.policy.pool=train", "placement.roles.grm.pool=train")
    survey = survey_run(config, lambda what, share: None)
    parts = {role: memory_parts(survey, role) for role in survey.placement.seats}
    warnings = overfull_slots(survey, parts)
    assert warnings
    assert all("give the roles pools of their own" in warning for warning in warnings)


def test_the_recipe_asks_for_its_prompts() -> None:
    with pytest.raises(ConfigError, match=r"^data\.path: missing; give a .jsonl or .parquet file"):
        composed("+experiment=qwen3_8b")


def test_a_model_of_unknown_shape_is_planned_but_for_its_memory(big_run: tuple[str, ...]) -> None:
    text = planned(*big_run, "policy=path", "policy.path=Nobody/Nothing")
    assert "policy   not known" in text
    assert "memory of policy: declare policy.shape" in text


def test_what_is_wrong_on_any_machine_is_an_error_in_a_plan_too(big_run: tuple[str, ...]) -> None:
    for override, message in (
        ("policy.path=/nope", r"^policy\.path: no directory '/nope'"),
        ("data.path=nope.jsonl", r"^data\.path: nope.jsonl: no such file"),
        ("placement.roles.learner.replicas=5", r"^placement\.roles\.learner: 5 replicas"),
        ("policy.shape.hidden_size=0", r"^policy\.shape\.hidden_size: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned(*big_run, override)
