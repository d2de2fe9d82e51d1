"""The components of the policy's pipeline: each part has the wrappers of its run, and no others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from configs import judge_config, run_config

from grmpipe.config.reward import RewardConfig
from grmpipe.envs.episode_slots import EpisodeSlots
from grmpipe.pipeline.interfaces import PipelineComponents
from grmpipe.run.build.compose_pipeline import Learners, compose, compose_health
from grmpipe.run.features.cotrain.cotraining import CoTrainings, LockstepTrainer
from grmpipe.scheduler.events import NoEvents
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.time_shared_learner import TimeSharedTrainer
from grmpipe.types import Failed


class Part:
    """Takes the place of a part that a composition only passes on."""

    size, dp_size, value_cache = 1, 1, object()


class CoTraining(Part):
    def record(self, play: object) -> tuple[str, object]:
        return "recorded", play

    def in_lockstep(self, trainer: Any) -> LockstepTrainer:
        return LockstepTrainer(trainer, cast(Any, None), cast(Any, None))


PLAY, JOURNAL = Part(), Part()


def composed(**learners: Any) -> PipelineComponents:
    parts: Any = {
        "prompts": Part(),
        "play": PLAY,
        "slots": EpisodeSlots(),
        "judge": Part(),
        "journal": JOURNAL,
        "teachers": {},
    }
    given: Any = {"policy": Part(), "push": Part()} | learners

    async def compose_it() -> PipelineComponents:
        return compose(run_config(), Learners(**given), too_long=lambda prompt: False, events=NoEvents(), **parts)

    return asyncio.run(compose_it())


def test_a_plain_run_wraps_nothing() -> None:
    parts = composed()
    assert isinstance(parts.trainer, BatchTrainer)
    assert (parts.play, parts.journal) == (PLAY, JOURNAL)


def test_the_device_is_the_learners_within_the_grms_lockstep() -> None:
    parts = composed(share=Part(), cotrainings=CoTrainings([cast(Any, CoTraining())]))
    assert isinstance(parts.trainer, LockstepTrainer)
    assert isinstance(parts.trainer.trainer, TimeSharedTrainer)
    assert parts.play == ("recorded", PLAY)


def test_the_judges_health_has_the_settings_of_the_only_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.run.build.compose_pipeline.VERDICTS_WINDOW", 2)
    exact = judge_config(kind="rule", max_failure_rate=0.5)
    health = compose_health(run_config(judges={"exact": exact}, reward=RewardConfig(judge="exact")))

    async def fail() -> None:
        health.record(Failed(stage="judge", cause="died", attempts=1, detail=""))

    asyncio.run(fail())
    assert "1 of the last 1 verdicts failed (100%; judges.exact.max_failure_rate=0.5)" in health.cause


def test_the_critic_values_the_groups_of_the_flow() -> None:
    critic = Part()
    assert composed(critic=critic).valuer is critic.value_cache
