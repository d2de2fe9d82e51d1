"""The reward function for TRL, called as by `_calculate_rewards` of trl/trainer/grpo_trainer.py in TRL 1.16.0."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_judge import scripted_judge

from grmpipe.clients import judge_client
from grmpipe.clients.judge_client import NotJudgedError
from grmpipe.clients.trl import JudgeReward


class Trainer:
    """What a reward function is handed of TRL's trainer: bound methods of it."""

    def __init__(self, *reward_funcs: object) -> None:
        self.reward_funcs = reward_funcs
        self.metrics: dict[str, float] = {}
        self.extra: dict[str, Any] = {}

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def log_extra(self, name: str, values: list[str]) -> None:
        self.extra[name] = values

    async def call(self, reward: JudgeReward, prompts: list, completions: list, **columns: list) -> list[float | None]:
        return await reward(
            prompts=prompts, completions=completions, completion_ids=[[1]] * len(prompts), **columns,
            trainer_state=SimpleNamespace(global_step=7), log_extra=self.log_extra, log_metric=self.log_metric,
        )  # fmt: skip


def text(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def test_siblings_are_judged_together_and_a_failure_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with scripted_judge() as judge:
            trainer = Trainer(reward := JudgeReward(judge.url))
            prompts = [text("user", one) for one in ("a", "a", "b", "a")]
            completions = [text("assistant", one) for one in ("x", "no", "xyz", "xy")]
            rewards = await trainer.call(reward, prompts, completions, solution=["1", "1", "2", "1"], level=[None] * 4)
            assert rewards == [1.0, None, 3.0, 2.0]
            assert {one["step"] for one in judge.asked} == {7}
            asked = sorted((one["prompt"][0]["content"], one["solution"], len(one["responses"])) for one in judge.asked)
            assert asked == [("a", "1", 1), ("a", "1", 2), ("b", "2", 1)]
            assert trainer.metrics == {"judge_failed": 0.25}
            assert trainer.extra == {
                "judge_failed": ["", "unparseable", "", ""],
                "critique": ["x!", "", "xyz!", "xy!"],
            }
            await trainer.call(reward, prompts[:1], [text("assistant", "no")])
        assert [one.message for one in caplog.records] == [
            "a completion has no reward (judge_failed): unparseable: it ends with hm"
        ], "each cause is said once"

    asyncio.run(check())


def test_only_the_named_columns_are_sent_and_tell_groups_apart() -> None:
    async def check() -> None:
        async with scripted_judge() as judge:
            reward = JudgeReward(judge.url, columns=["solution"])
            await Trainer(reward).call(reward, ["a"] * 3, ["x"] * 3, solution=["1", "1", "2"], picture=[object()] * 3)
            assert sorted((one["solution"], len(one["responses"])) for one in judge.asked) == [("1", 2), ("2", 1)]
            assert not any("picture" in one for one in judge.asked)
            with pytest.raises(ValueError, match="columns: the dataset has no 'solution'; its columns: level"):
                await Trainer(reward).call(reward, ["a"], ["x"], level=[1])

    asyncio.run(check())


def test_a_group_without_an_answer_is_none_and_a_batch_without_any_ends_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(judge_client, "FIRST_PAUSE_S", 9)  # one try each

    async def check() -> None:
        async with scripted_judge([503]) as judge:
            trainer = Trainer(reward := JudgeReward(judge.url, timeout_s=2))
            rewards = await trainer.call(reward, ["a", "b"], ["x", "x"])
            assert sorted(rewards, key=str) == [1.0, None]
            assert "1 completions have no reward: no answer from" in caplog.text
            judge.script += [503, 503]
            with pytest.raises(NotJudgedError, match="no answer from"):
                await trainer.call(reward, ["a", "b"], ["x", "x"])

    asyncio.run(check())


def test_another_reward_function_beside_it_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with scripted_judge() as judge:
            await Trainer(reward := JudgeReward(judge.url)).call(reward, ["a"], ["x"])
            assert not caplog.records
            for _ in range(2):
                await Trainer(reward, len).call(reward, ["a"], ["x"])
            (warning,) = caplog.records
            assert warning.levelno == logging.WARNING and "reward=mix" in warning.getMessage()

    asyncio.run(check())
