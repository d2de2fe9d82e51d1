"""Judges by a reward function of the user's own: its number is the reward."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import cast

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.user_code import UserCodeError, called
from grmpipe.judge.reward_function import Scored, reward_function
from grmpipe.judge.verdict import failed, outcome, unjudged, unvoted
from grmpipe.types import Cause, JudgeReport, JudgeSession, JudgeTask, Prompt, Rollout
from scheduler.daemon_threads import TooManyStuck, in_own_thread

log = logging.getLogger(__name__)

COMPONENT, RAW = "function", "raw_reward"  # names in a verdict's breakdown


class FunctionJudge:
    """A function judges each response as it ends, or the siblings of a group together. Its number is the reward, on no
    scale; with `judge.score_range` it is brought to [0, 1], and a number outside has failed (`out_of_range`). None has
    failed as `abstained`; what the function raises, or returns that is no number, as `broken`.
    """

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ValueError that begins with the key below the judge's section."""
        key = config.key
        self.function = reward_function(config.function, f"{key}.function", show_thoughts=config.show_thoughts)
        self._by_group = config.function_batch == "group"
        if self._by_group and not self.function.is_batch:
            raise ValueError(
                f"function_batch: group hands over lists, and {config.function} takes one response; give it the "
                f"parameter `responses`, or type {key}.function_batch=rollout"
            )
        self._range = config.score_range
        self._scale = config.scale
        self._timeout_s = config.timeout_s
        self._has_failed = False

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return FunctionSession(self, prompt, size if self._by_group else 1)

    async def judge(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[JudgeReport]:
        """The reports on responses to a prompt, in their order, from one call."""
        try:
            given = await self._call(prompt, rollouts)
        except TimeoutError:
            words = f"{self.function.owner} took more than judge.timeout_s = {self._timeout_s:g} s"
            return [self._failed("timeout", words, prompt)] * len(rollouts)
        except (UserCodeError, TooManyStuck) as error:
            return [self._failed("broken", str(error), prompt)] * len(rollouts)
        return [self._report(one, prompt, rollout) for one, rollout in zip(given, rollouts, strict=True)]

    async def _call(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Scored]:
        one = self.function
        async with asyncio.timeout(self._timeout_s):
            with called(one.owner, (TooManyStuck,)):
                arguments = one.arguments(prompt, rollouts)
                if one.is_async:
                    given = await cast(Awaitable[object], one.function(**arguments))
                else:
                    given = await in_own_thread(one.function, **arguments)
                return one.read(given, len(rollouts))

    def _report(self, given: Scored, prompt: Prompt, rollout: Rollout) -> JudgeReport:
        if given.reward is None:
            return self._failed("abstained", f"{self.function.owner} returned None", prompt)
        reward = score = given.reward
        parts = dict(given.metrics)
        if self._range is not None:
            low, high = self._range
            if not low <= reward <= high:
                words = f"{self.function.owner} returned {reward:g}, which is outside of [{low:g}, {high:g}]"
                return self._failed("out_of_range", words, prompt)
            parts[RAW], reward = reward, (reward - low) / (high - low)
            score = self._scale.score_of(reward)
        return unvoted(outcome(rollout, reward), score, parts | {COMPONENT: reward})

    def _failed(self, cause: Cause, words: str, prompt: Prompt) -> JudgeReport:
        # The first failure that isn't the function's own wish is for the console, the others are for run.log.
        level = logging.INFO if self._has_failed or cause == "abstained" else logging.WARNING
        log.log(level, "no verdict: %s", words)
        self._has_failed |= cause != "abstained"
        return unjudged(failed(cause, f"prompt {prompt.prompt_id}: {words}"))


class FunctionSession:
    """Hands over `size` responses at a time: one as it ends, or a whole group."""

    def __init__(self, judge: FunctionJudge, prompt: Prompt, size: int) -> None:
        self._judge = judge
        self._prompt = prompt
        self._size = size
        self._waiting: list[int] = []
        self._rollouts: dict[int, Rollout] = {}

    def begin(self) -> Sequence[JudgeTask]:
        return ()

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._rollouts[rollout.sibling] = rollout
        self._waiting.append(rollout.sibling)
        if len(self._waiting) < self._size:
            return ()
        members, self._waiting = tuple(sorted(self._waiting)), []
        return (JudgeTask(members=members),)

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        rollouts = [self._rollouts[sibling] for sibling in judge_task.members]
        return dict(zip(judge_task.members, await self._judge.judge(self._prompt, rollouts), strict=True))
