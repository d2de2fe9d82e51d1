"""Judges by numbers: those that the environment gave for its turns, and those of a scalar reward model, which reads a
conversation and gives one number.

The conversation is rendered by the reward model's own chat template, in its own tokens: no text of the policy becomes
markup.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.raw_scores import EnvRewardConfig, sum_rewards
from grmpipe.judge.verdict import make_failure, outcome, report_failures, report_score
from grmpipe.models.chat.chat_template import count_chars, off_loop_if_long
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.models.types import EngineDied, EngineRefused, Message, Scorer
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import Failed, JudgeReport, Prompt, RewardSpan, Rollout

SCALAR, ENV, RAW_SCORE = "scalar", "env", "raw_score"  # names in a verdict's breakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarModel:
    """A scalar reward model that judges ask, here or behind an endpoint.

    context_tokens: its window; 0 if unknown.
    clock:          times its answers; stands still while a budget holds requests back. None: the loop's.
    """

    scorer: Scorer
    renderer: Renderer
    context_tokens: int
    clock: ActiveClock | None = None

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds) if self.clock is None else self.clock.timeout(seconds)


class ScalarJudge:
    """Judges a rollout by the raw score of its conversation. Sends at most `judge.limits.max_concurrency` at once."""

    def __init__(self, model: ScalarModel, config: JudgeConfig) -> None:
        self._model = model
        self._config = config
        self._places = PrioritySemaphore(config.limits.max_concurrency)

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        try:
            messages = tuple(conversation(prompt, rollout, thoughts=self._config.format.show_thoughts))
            token_ids = await off_loop_if_long(
                count_chars(messages), partial(self._model.renderer.render_whole, messages)
            )
        except ValueError as error:  # a template may refuse some order of roles
            return report_failures(make_failure("refused", f"prompt {prompt.prompt_id}: {error}"))
        if 0 < self._model.context_tokens < len(token_ids):
            detail = f"a conversation of {len(token_ids)} tokens; the reward model reads {self._model.context_tokens}"
            return report_failures(make_failure("too_long", detail))
        raw_score = await self._raw_score(token_ids, priority)
        return report_failures(raw_score) if isinstance(raw_score, Failed) else self._report(rollout, raw_score)

    async def _raw_score(self, token_ids: Sequence[int], priority: int) -> float | Failed:
        try:
            async with self._places.enter(priority), self._model.time_limit(self._config.limits.timeout_s):
                raw_score = await self._model.scorer.score(token_ids, priority)
        except TimeoutError:
            return make_failure("timeout", f"no score within {self._config.limits.timeout_s:g} s", 1)
        except EngineRefused as error:
            return make_failure("refused", str(error), 1)
        except EngineDied as error:
            return make_failure("died", str(error), 1)
        if not math.isfinite(raw_score):
            return make_failure("unparseable", f"the reward model gave {raw_score}: check its weights and its dtype", 1)
        return raw_score

    def _report(self, rollout: Rollout, raw_score: float) -> JudgeReport:
        """The reward, its place on the judge's scale as the score, and the raw score for people to read."""
        reward = self._config.scalar.to_reward(raw_score)
        breakdown = {SCALAR: reward, RAW_SCORE: raw_score}
        return report_score(outcome(rollout, reward), self._config.scale.to_score(reward), breakdown)


def conversation(prompt: Prompt, rollout: Rollout, *, thoughts: bool) -> Iterator[Message]:
    """The task as the policy read it, then all turns of the policy with the environment's replies between them.

    thoughts: whether they are shown.
    """
    yield from rollout.opening or prompt.messages
    for number, turn in enumerate(rollout.turns, start=1):
        yield Message(role="assistant", content=turn.completion.text if thoughts else turn.completion.answer)
        if number < len(rollout.turns):  # a reward model scores a conversation that ends with the assistant
            # A chat has no place for an assistant's message that the policy didn't write: it would be scored as its.
            yield from (reply for reply in turn.replies if reply.role != "assistant")


class EnvRewardJudge:
    """The sum of the environment's rewards is the score and the reward, on no scale. A rollout without any reward is
    Failed: the environment didn't say what it is worth, which is not 0, unless `missing` says so.
    """

    def __init__(self, config: EnvRewardConfig) -> None:
        self._config = config

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        found = [self._config.sum_rewards(turn.rewards) for turn in rollout.turns]
        given = {turn: reward for turn, reward in enumerate(found) if reward is not None}
        if not given and self._config.missing is not None:
            given = {len(rollout.turns) - 1: self._config.missing}
        if not given:
            return report_failures(make_failure("undecided", self._missing(rollout)))
        total = sum_rewards(given.values())
        rewards = by_turn(rollout, given) if self._config.by_turn else outcome(rollout, total)
        return report_score(rewards, total, {ENV: total})

    def _missing(self, rollout: Rollout) -> str:
        wanted = f" called {' or '.join(self._config.weights)}" if self._config.weights else ""
        got = ", ".join(rollout.env_rewards) or "none at all"
        return f"the environment gave no reward{wanted}; it gave {got}"


def by_turn(rollout: Rollout, rewards: dict[int, float]) -> tuple[RewardSpan, ...]:
    """A span over the tokens of each turn that earned a reward."""
    return tuple(
        RewardSpan(turn=turn, start=0, end=len(rollout.turns[turn].completion.token_ids), value=reward)
        for turn, reward in rewards.items()
    )
