"""Judges of the user's own: a reward function, whose number is the reward; a whole judge by its dotted path."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Sequence
from typing import cast

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.dotted_path import find_at
from grmpipe.config.keys.user_code import UserCodeError, call_guarded, format_value
from grmpipe.judge.checked_judge import CheckedJudge, CheckedRolloutJudge
from grmpipe.judge.kinds.reward_function import GivenReward, reward_function
from grmpipe.judge.pointwise_adapter import HandOver, PointwiseAdapter, RolloutJudge
from grmpipe.judge.verdict import make_failure, outcome, report_failures, report_score
from grmpipe.scheduler.daemon_threads import TooManyStuck, in_own_thread
from grmpipe.types import Cause, Judge, JudgeReport, JudgeSession, Prompt, Rollout

log = logging.getLogger(__name__)

MAX_TOLD = 8  # names of a function's further results in the log: they may be made up for each response
COMPONENT, RAW = "function", "raw_reward"  # names in a verdict's breakdown


class FunctionJudge:
    """A function judges each response as it ends, or the siblings of a group together. Its number is the reward, on no
    scale; with `judge.function_call.score_range` it is brought to [0, 1], and a number outside has failed
    (`out_of_range`). None has failed as `abstained`; what the function raises, or returns that is no number, as
    `broken`.
    """

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ValueError that begins with the key below the judge's section."""
        self._key = key = config.key
        self.function = reward_function(config.function, f"{key}.function", show_thoughts=config.format.show_thoughts)
        self._by_group = config.function_call.batch == "group"
        if self._by_group and not self.function.is_batch:
            raise ValueError(
                f"function_call.batch: group hands over lists, and {config.function} takes one response; give it the "
                f"parameter `responses`, or type {key}.function_call.batch=rollout"
            )
        self._range = config.function_call.score_range
        self._scale = config.scale
        self._timeout_s = config.limits.timeout_s
        self._has_failed = False
        self._left_out: set[str] = set()  # unused entries of its dicts, named to the user

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return HandOver(lambda rollouts, priority: self._judge(prompt, rollouts), size if self._by_group else 1)

    async def _judge(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[JudgeReport]:
        """The reports on responses to a prompt, in their order, from one call."""
        try:
            given = await self._call(prompt, rollouts)
        except TimeoutError:
            words = f"{self.function.owner} took more than {self._key}.limits.timeout_s = {self._timeout_s:g} s"
            return [self._failed("timeout", words, prompt)] * len(rollouts)
        except (UserCodeError, TooManyStuck) as error:
            return [self._failed("broken", str(error), prompt)] * len(rollouts)
        return [self._report(one, prompt, rollout) for one, rollout in zip(given, rollouts, strict=True)]

    async def _call(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[GivenReward]:
        one = self.function
        async with asyncio.timeout(self._timeout_s):
            with call_guarded(one.owner, (TooManyStuck,)):
                arguments = one.arguments(prompt, rollouts)
                if one.is_async:
                    given = await cast(Awaitable[object], one.function(**arguments))
                else:
                    given = await in_own_thread(one.function, **arguments)
                return one.read(given, len(rollouts))

    def _report(self, given: GivenReward, prompt: Prompt, rollout: Rollout) -> JudgeReport:
        new = {name: value for name, value in given.left_out.items() if name not in self._left_out}
        if new and len(self._left_out) < MAX_TOLD:
            self._left_out |= new.keys()
            shown = ", ".join(f"{name} = {format_value(value)}" for name, value in new.items())
            log.warning(
                "%s returned %s, which no journal keeps: beside the reward only finite numbers are recorded",
                self.function.owner, shown,
            )  # fmt: skip
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
            score = self._scale.to_score(reward)
        return report_score(outcome(rollout, reward), score, parts | {COMPONENT: reward})

    def _failed(self, cause: Cause, words: str, prompt: Prompt) -> JudgeReport:
        # The first failure that isn't the function's own choice is for the console, the others are for run.log.
        level = logging.INFO if self._has_failed or cause == "abstained" else logging.WARNING
        log.log(level, "no verdict: %s", words)
        self._has_failed |= cause != "abstained"
        return report_failures(make_failure(cause, f"prompt {prompt.prompt_id}: {words}"))


def load_custom_judge(config: JudgeConfig) -> Judge:
    """An instance of `judge.custom.target` behind its door: a Judge, which has `open`, or a RolloutJudge, which has
    `judge`.

    Raises ValueError if the class can't be imported, can't be constructed, or is neither.
    """
    made = find_at(config.custom.target, "custom.target")
    if not inspect.isclass(made):
        raise ValueError(f"custom.target: {config.custom.target} is not a class")
    try:
        judge = made(**config.custom.options)
    except (Exception, SystemExit) as error:  # importing or constructing the user's class may raise anything
        raise ValueError(
            f"custom.options: {config.custom.target} can't be constructed with {config.custom.options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    key = f"{config.key}.custom.target"
    if isinstance(judge, PointwiseAdapter):
        return PointwiseAdapter(CheckedRolloutJudge(judge.judge, key))
    if isinstance(judge, Judge):
        return CheckedJudge(judge.open, judge.open, key)
    if isinstance(judge, RolloutJudge):
        return PointwiseAdapter(CheckedRolloutJudge(judge, key))
    raise ValueError(
        f"custom.target: {config.custom.target} is not a judge: it needs `async def judge(self, prompt, "
        f"rollout, priority=0)` that "
        "returns a JudgeReport, or `open(self, prompt, group_id, size)` that returns a JudgeSession"
    )
