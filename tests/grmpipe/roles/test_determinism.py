"""A deterministic run refuses settings that depend on the order of arrival; the error names the key and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.roles.role_placement import seat_roles
from grmpipe.roles.roles import Roles
from grmpipe.run.tasks.train_meta_rm import prepare_meta_training

ROOT = Path(__file__).parents[3]


def deterministic(experiment: str, *overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", [f"+experiment={experiment}", "train.deterministic=true", *overrides]))


def seated(*overrides: str) -> Roles:
    return seat_roles(deterministic("quickstart", *overrides))[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=vllm"], "with policy.engine=vllm .*; type policy.engine=embedded"),
        (["grm.engine=openai", "grm.path=judge", "engine.openai.base_url=http://localhost:1/v1"],
         "with grm.engine=openai .*; type grm.engine=embedded"),
        (["placement=elastic"], "pool engines move .*; type placement.pools.engines.elastic=false"),
        (["placement=time_shared"], "pool all puts .* to sleep .*; type placement.pools.all.time_shared=false"),
        (["placement.pools.train.resource=gpu"], "learner is on a GPU, .*; type placement.pools.train.resource=cpu|"
         "policy is on a GPU, .*; type placement.pools.train.resource=cpu"),
        (["algorithm=ppo", "critic=policy"], "a critic .*; type critic=none algorithm.estimator=grpo"),
        (["grm.train.enabled=true", "grm.train.data_path=tiny://judgements"],
         "a GRM that learns .*; type grm.train.enabled=false"),
        (["judge.early_stop.kind=relaxed", "judge.num_judgements=4"], "type judge.early_stop.kind=none"),
        (["judge=shared_principles"], "principles that failed .*; type judge.principles.kind=inline"),
        (["judge.vote=weighted", "meta_rm=tiny"], "a meta-RM .*; type meta_rm.max_batch_tokens=1"),
        (["+judge@judges.exact=rule", "reward=cascade", "reward.first=judge", "reward.then=exact"],
         "reward.share=0.25 goes .*; type reward.share=1"),
        (["task=train_judge_rft", "judge=label"], "task=train_judge_rft learns .*; type task=train"),
    ],
)  # fmt: skip
def test_deterministic_training_refuses_settings_that_depend_on_arrival(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.deterministic: .*({message}), or train\.deterministic=false$"):
        seated(*overrides)


def test_a_meta_rm_learns_from_judgements_as_they_come() -> None:
    with pytest.raises(ConfigError, match=r"^train\.deterministic: task=train_meta_rm learns .*; type task=train"):
        prepare_meta_training(deterministic("train_meta_rm"))


def test_engines_of_a_deterministic_run_are_batch_invariant() -> None:
    for role in seated("meta_rm=tiny", "meta_rm.max_batch_tokens=1", "judge.vote=weighted").served.values():
        assert role.engine_spec("m", 0).batch_invariant


def test_a_task_that_trains_nothing_ignores_the_key() -> None:
    seated("task=evaluate", "engine=vllm")
