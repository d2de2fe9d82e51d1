"""A GRM that calls tools before its verdict: a judgement is an episode, played by the policy's own loop.

    prompt -> call | results | -> call | results | -> verdict
              sampled  inserted   sampled  inserted    sampled

All turns are one completion, as the journal, votes and training know judgements. Only the last turn is read for a
verdict, so that no tool can write it. Others call such judges agentic; inspect-ai's agents that score end by the same
limits: messages, tokens, time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import pairwise

from grmpipe.config.judge import JudgeConfig
from grmpipe.envs.env import Action, Env, EnvFault, Episode, Observation, Opening
from grmpipe.envs.env_factory import MakeEnv
from grmpipe.envs.play import CallBudget, EpisodeLimits, RolloutRequest, play
from grmpipe.envs.tools.tool_env import RAISED
from grmpipe.judge.expectation import Decode
from grmpipe.judge.grm import GrmPrompt, LocalGrm
from grmpipe.judge.prompt_injection import TextGuard
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.types import (
    Completion,
    KeepsTrajectories,
    Message,
    RequestContext,
    SamplingParams,
    ToolResults,
    ToolSpec,
    join_spans,
)
from grmpipe.types import OVER_BUDGET, Prompt, Rollout, Turn

ASK_VERDICT = "No calls are left. Give your verdict now, in exactly the form that you were asked for."


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTools:
    """The tools of a judge in a run. specs: as the judge's chat template shows them."""

    make_env: MakeEnv
    specs: tuple[ToolSpec, ...]


def make_limits(judge: JudgeConfig, context_tokens: int) -> EpisodeLimits:
    """The limits of a judgement. Half of its tokens are kept for the verdict."""
    tools = judge.tools
    budget = CallBudget(
        max_calls=tools.max_calls, max_s=tools.max_s, max_tokens=judge.max_new_tokens // 2, ask=ASK_VERDICT
    )
    return EpisodeLimits(max_turns=tools.max_calls + 1, context_tokens=context_tokens, timed=True, calls=budget)


class GuardedTools:
    """The tools of a judge. One that raises fails the judgement: without its result another verdict might follow. Of
    one that looks into the policy's work the judge reads that instead: no work may escape its verdict by breaking a
    tool.

    guard: the judge's template's, for tools that look into the final state of a rollout; None: they don't.
    """

    def __init__(self, env: Env, guard: TextGuard | None) -> None:
        self._env, self._guard = env, guard

    async def open(self, episode: Episode) -> Opening:
        return await self._env.open(episode)

    async def step(self, action: Action) -> Observation:
        seen = await self._env.step(action)
        if self._guard is None:
            if RAISED in seen.faults:
                raise EnvFault("; ".join(one.content for one in seen.messages if " raised " in one.content))
            return seen
        return replace(seen, messages=[replace(one, content=self._guard.result(one.content)) for one in seen.messages])

    async def close(self) -> None:
        await self._env.close()


class ToolGrm:
    """A Grm around another on an engine of this run. engines: keep the tokens of an episode between its turns."""

    decode: Decode | None = None  # scores by tokens are of one turn

    def __init__(
        self,
        grm: LocalGrm,
        judge: JudgeConfig,
        tools: JudgeTools,
        renderer: Renderer,
        engines: KeepsTrajectories,
    ) -> None:
        self._grm, self._tools, self._renderer = grm, tools, renderer
        self._engines = engines
        self._limits = make_limits(judge, grm.context_tokens)
        self.name, self.context_tokens, self.thinking = grm.name, grm.context_tokens, grm.thinking

    @property
    def thinks(self) -> bool:
        return self._grm.thinks

    @property
    def busy_s(self) -> float:
        return self._grm.busy_s

    def escape_text(self, text: str) -> str:
        return self._grm.escape_text(text)

    def prompt(self, messages: Sequence[Message]) -> GrmPrompt:
        token_ids = self._renderer.render(messages, self._tools.specs)
        return GrmPrompt(messages=tuple(messages), token_ids=token_ids, num_tokens=len(token_ids))

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return self._grm.time_limit(seconds)

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        """Play one judgement. Raises EnvFault too: a tool raised, or its server is gone."""
        request = RolloutRequest(
            group_id=context.group_id,
            sibling=0,
            seed=params.seed,
            priority=context.priority,
            role=context.role,
            name=context.request_id,
            is_retry=context.is_retry,
            state=prompt.state,
        )
        task = Prompt(prompt_id=context.request_id, messages=prompt.messages)
        try:
            rollout = await play(request, task, self._tools.make_env(), self._grm, self._renderer, params, self._limits)
        finally:
            self._engines.end_trajectory(request.trajectory_id)
        return join_turns(rollout, self._renderer.decode)

    async def ask_verdict(
        self, prompt: GrmPrompt, judgement: Completion, params: SamplingParams, context: RequestContext
    ) -> Completion:
        return await self._grm.ask_verdict(prompt, judgement, params, context)


def join_turns(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> Completion:
    """The turns of an episode as one completion. An episode that ended with a call has no answer."""
    first, last = rollout.turns[0].completion, rollout.turns[-1].completion
    ids, logprobs = first.token_ids, first.logprobs
    stretches = [(span.version, span.start, span.end) for span in first.versions]
    results: list[ToolResults] = []
    for before, turn in pairwise(rollout.turns):
        start, sampled = len(ids), turn.completion
        ids += (*turn.new_ids, *sampled.token_ids)
        logprobs += (*((0.0,) * len(turn.new_ids)), *sampled.logprobs)
        end = start + len(turn.new_ids)
        # What was inserted counts as of the version that goes on after it.
        stretches += [
            (span.version, start if not index else end + span.start, end + span.end)
            for index, span in enumerate(sampled.versions)
        ]
        results.append(place_results(before, ids, start, end, decode))
    ids_before = len(ids) - len(last.token_ids)
    text = decode(ids) if results else first.text
    if OVER_BUDGET in rollout.turns[-1].faults:
        results.append(place_results(rollout.turns[-1], ids, len(ids), len(ids), decode, len(text)))
    if not results:
        return first
    thought = results[-1].text_end + last.thought_chars if last.thought_chars else 0
    return replace(
        last,
        token_ids=ids,
        logprobs=logprobs,
        text=text,
        versions=join_spans(last.versions[-1].model, stretches, last.oldest_version),
        thought_chars=thought,
        thought_tokens=sum(turn.completion.thought_tokens for turn in rollout.turns),
        cached_tokens=sum(turn.completion.cached_tokens for turn in rollout.turns),
        experts_TLK=None,
        inserted=last.inserted and (ids_before + last.inserted[0], ids_before + last.inserted[1]),
        tool_results=tuple(results),
    )


def place_results(
    turn: Turn, ids: Sequence[int], start: int, end: int, decode: Callable[[Sequence[int]], str], at: int | None = None
) -> ToolResults:
    """at: where both ends stand in the text; None: found by decoding."""
    return ToolResults(
        start=start,
        end=end,
        text_start=len(decode(ids[:start])) if at is None else at,
        text_end=len(decode(ids[:end])) if at is None else at,
        calls=tuple(call.name for call in turn.tool_calls),
        faults=turn.faults,
        took_s=turn.env_s,
    )
