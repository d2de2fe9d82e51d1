"""Plays one episode: one environment, one policy, until done. Tokens in, tokens out: sampled ids are never
re-tokenized.

    env.open -> render -> +-> sample -> parse -> env.step -> extend -+ ... done, or truncated by tokens, turns,
                          +------------------------------------------+     context, time

At the end, the environment of one question and one answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from grmpipe.envs.env import Action, Env, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.models.chat.chat_template import count_chars, off_loop_if_long
from grmpipe.models.types import (
    Completion,
    EngineDied,
    Generates,
    Message,
    ParsedTurn,
    RequestContext,
    SamplingParams,
    ToolCall,
    ToolSpec,
    ignore_first_token,
)
from grmpipe.types import MALFORMED, OVER_BUDGET, BegunRollout, Prompt, Rollout, TruncationReason, Turn

DECIMALS_S = 4  # for measured times


class RolloutAborted(EngineDied):
    """A request ended before the policy finished its turn: there is no rollout."""


class NotAsBefore(Exception):
    """A new environment isn't in the state of the one before a resume, so the episode can't go on."""


class TurnRenderer(Protocol):
    """The parts of a tokenizer with a chat template that playing needs."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """A conversation from its start, up to the policy's turn."""
        ...

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        """What follows the policy's turn: its end if it wasn't sampled, the replies, and the start of the next one."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        """A completion's text and its tool calls, taken apart."""
        ...


def ignore_turn(so_far: Rollout) -> None:
    """For callers that need no callback after a turn."""


def keep_nothing(begun: BegunRollout) -> None:
    """For callers that resume no episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout to play: a sibling of a group, and its seed.

    attempt: how many of its episodes have failed.
    role:    who plays it.
    name:    names the episode, for one that isn't a sibling's; empty: its group and sibling do.
    begun:   its turns from before a resume; it goes on after them.
    state:   that its environment opens in: of the rollout that a judge's tools look into.
    on_turn: called after each turn but the last one, with the rollout so far, as if it had been truncated there.
    on_resumable: called then too, if the environment could go on from there after a resume.
    """

    group_id: str
    sibling: int
    seed: int
    priority: int = 0
    attempt: int = 0
    role: str = "policy"
    name: str = ""
    is_retry: bool = False
    state: bytes = field(default=b"", repr=False)
    begun: BegunRollout | None = field(default=None, repr=False)
    on_turn: Callable[[Rollout], None] = field(default=ignore_turn, compare=False, repr=False)
    on_resumable: Callable[[BegunRollout], None] = field(default=keep_nothing, compare=False, repr=False)

    @property
    def trajectory_id(self) -> str:
        """Names the episode, in the ids of its requests."""
        return self.name or f"{self.group_id}/{self.sibling}" + (f"/a{self.attempt}" if self.attempt else "")

    def context(self, turn: int, *, has_more: bool) -> RequestContext:
        """The request of a turn, from 0. has_more: whether the episode may have further turns."""
        return RequestContext(
            request_id=f"{self.trajectory_id}/t{turn}",
            group_id=self.group_id,
            role=self.role,
            priority=self.priority,
            trajectory_id=self.trajectory_id if has_more else "",
            is_retry=self.is_retry,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBudget:
    """What the calls of an episode may take together. Once one of these is used up, `ask` asks for the answer, and the
    next turn is the last; calls beyond are answered, and not made.

    max_tokens: of the turns so far; the limit of the request's parameters is then that of all turns together.
    """

    max_calls: int
    max_s: float
    max_tokens: int
    ask: str

    def is_spent(self, turns: Sequence[Turn]) -> bool:
        took_s, num_tokens = sum(turn.env_s for turn in turns), count_sampled(turns)
        return count_calls(turns) >= self.max_calls or num_tokens >= self.max_tokens or took_s >= self.max_s


def count_calls(turns: Sequence[Turn]) -> int:
    """With those that couldn't be read."""
    return sum(len(turn.tool_calls) + turn.faults.count(MALFORMED) for turn in turns)


def count_sampled(turns: Sequence[Turn]) -> int:
    return sum(len(turn.completion.token_ids) for turn in turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits on an episode, besides those of the environment itself.

    context_tokens: the policy's window; 0: unknown, so that the engine refuses what doesn't fit.
    episode_s:      no turn begins after this time.
    timed:          whether the environment takes time that is worth measuring.
    calls:          limits on calls, after which an answer is asked for; None: only those above.
    keeps_state:    whether the environment must give its state, whose last one the rollout keeps.
    """

    max_turns: int
    context_tokens: int = 0
    episode_s: float = float("inf")
    timed: bool = False
    calls: CallBudget | None = None
    keeps_state: bool = False


# An episode whose other parts are fixed: request, prompt, and the callback at the first token.
Play = Callable[[RolloutRequest, Prompt, Callable[[], None]], Awaitable[Rollout]]


async def play(
    request: RolloutRequest,
    prompt: Prompt,
    env: Env,
    policy: Generates,
    renderer: TurnRenderer,
    params: SamplingParams,
    limits: EpisodeLimits,
    on_first_token: Callable[[], None] = ignore_first_token,
) -> Rollout:
    """Play one rollout, and close the environment. Raises EngineRefused, RolloutAborted, EngineDied, EnvFault, or
    NotAsBefore.
    """
    episode = _Episode(request, prompt, env, policy, renderer, params, limits, on_first_token)
    try:
        return await episode.play()
    finally:
        await env.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Plays rollouts, each in an environment of its own."""

    make_env: Callable[[], Env]
    policy: Generates
    renderer: TurnRenderer
    params: SamplingParams
    limits: EpisodeLimits

    async def play(self, request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        """One rollout. Raises as the function `play` does."""
        return await play(
            request, prompt, self.make_env(), self.policy, self.renderer, self.params, self.limits, on_first_token
        )


@dataclass(slots=True)
class _Episode:
    """The state of an episode between two turns. Used once."""

    request: RolloutRequest
    prompt: Prompt
    env: Env
    policy: Generates
    renderer: TurnRenderer
    params: SamplingParams
    limits: EpisodeLimits
    on_first_token: Callable[[], None]
    tools: tuple[ToolSpec, ...] = ()
    state_key: str = ""
    replayable: bool = False
    opening: tuple[Message, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    state: bytes = b""
    is_ending: bool = False  # the answer was asked for

    async def play(self) -> Rollout:
        clock, request = asyncio.get_running_loop(), self.request
        begun_s = clock.time()
        opening = await self.env.open(
            Episode(
                prompt=self.prompt,
                group_id=request.group_id,
                sibling=request.sibling,
                attempt=request.attempt,
                seed=request.seed,
                saved=request.begun.saved if request.begun is not None else request.state,
            )
        )
        boot_s = round(clock.time() - begun_s, DECIMALS_S) if self.limits.timed else 0.0
        self.tools, self.state_key, self.replayable = tuple(opening.tools), opening.state_key, opening.replayable
        self._keep_state(opening.saved, "open")
        messages = tuple(opening.messages)
        self.opening = () if messages == self.prompt.messages else messages
        reason = await self._turns(messages, begun_s + self.limits.episode_s)
        return replace(
            self._so_far(),
            status="finished" if reason is None else "truncated",
            reason=reason or "",
            boot_s=boot_s,
            took_s=round(clock.time() - begun_s, DECIMALS_S) if self.limits.timed else 0.0,
        )

    def _so_far(self) -> Rollout:
        return Rollout(
            group_id=self.request.group_id,
            sibling=self.request.sibling,
            turns=tuple(self.turns),
            status="truncated",
            opening=self.opening,
            attempt=self.request.attempt,
            state=self.state,
        )

    def _keep_state(self, saved: bytes, stage: str) -> None:
        if not self.limits.keeps_state:
            return
        if not saved:
            raise EnvFault(
                f"{stage} returned no state, which the tools of a judge read: return saved=..., or type "
                "judge.tools.state=false",
                "protocol",
            )
        self.state = saved

    async def _turns(self, opening: Sequence[Message], end_s: float) -> TruncationReason | None:
        """Play all turns. Returns what truncated the episode; None if it came to its own end."""
        with self._rendering("open"):
            new_ids = prompt_ids = await off_loop_if_long(
                count_chars(opening), partial(self.renderer.render, opening, self.tools)
            )
        if self.request.begun is not None:
            await self._go_on_from(self.request.begun, new_ids)
            *_, asked_ids = self._so_far().prompts()
            new_ids = await self._extended(self.turns[-1])
            prompt_ids = (*asked_ids, *self.turns[-1].completion.token_ids, *new_ids)
        while True:
            room = self._room(prompt_ids)
            completion = await self._sampled(prompt_ids, room)
            turn = Turn(new_ids=new_ids, completion=completion, state_key=self.state_key)
            if completion.finish_reason != "stop":
                self.turns.append(turn)
                return "context" if room < self._num_allowed() else "tokens"
            is_last = self.is_ending or len(self.turns) + 1 >= self.limits.max_turns
            observation, turn = await self._stepped(turn, is_last)
            budget = self.limits.calls
            if budget is not None and not observation.done and budget.is_spent((*self.turns, turn)):
                self.is_ending = True
                turn = replace(turn, replies=(*turn.replies, Message(role="user", content=budget.ask)))
            self.turns.append(turn)
            if observation.done:
                return None
            if is_last:
                return "turns"
            if asyncio.get_running_loop().time() >= end_s:
                return "time"
            new_ids = await self._extended(turn)
            prompt_ids = (*prompt_ids, *completion.token_ids, *new_ids)
            if self._room(prompt_ids) < 1:
                return "context"
            self.request.on_turn(so_far := self._so_far())
            if self.replayable or observation.saved:
                so_far = replace(so_far, state=b"")  # it is the same, or repeated
                self.request.on_resumable(BegunRollout(so_far=so_far, saved=observation.saved))

    async def _extended(self, turn: Turn) -> tuple[int, ...]:
        """The tokens between a turn and the next one."""
        with self._rendering("step"):
            extend = partial(self.renderer.extend, turn.replies, self.tools, ended=not turn.completion.stop_text)
            return await off_loop_if_long(count_chars(turn.replies), extend)

    async def _go_on_from(self, begun: BegunRollout, new_ids: tuple[int, ...]) -> None:
        """Take over the turns before a resume: by the environment's state, or by repeating the actions. new_ids: the
        opening's. Raises NotAsBefore.
        """
        before = begun.so_far
        if (self.opening, new_ids) != (before.opening, before.turns[0].new_ids):
            raise NotAsBefore("the environment opened otherwise than before")
        if begun.saved:
            self._keep_state(begun.saved, "open")
        for number, turn in enumerate(before.turns):
            if not begun.saved and not await self._repeats(turn):
                raise NotAsBefore(f"turn {number} brought another reply than before")
            self.turns.append(turn)
            self.request.on_turn(self._so_far())

    async def _repeats(self, turn: Turn) -> bool:
        """Whether the environment answers a turn as it did before."""
        asked = Turn(new_ids=turn.new_ids, completion=turn.completion, state_key=self.state_key)
        try:
            observation, again = await self._stepped(asked, is_last=False)
        except EnvFault as fault:
            raise NotAsBefore(f"it failed: {fault}") from fault
        return not observation.done and replace(again, env_s=turn.env_s) == turn

    @contextmanager
    def _rendering(self, stage: str) -> Iterator[None]:
        """Context: what the chat template refuses is the environment's fault, unless it is the data's own prompt."""
        try:
            yield
        except ValueError as error:
            if not (self.opening or self.tools or self.turns):
                raise
            raise EnvFault(f"{stage} returned what the chat template doesn't take: {error}", "protocol") from error

    def _room(self, prompt_ids: Sequence[int]) -> int:
        """Tokens that the next turn may take. The first gets the whole limit: the engine refuses too long a prompt."""
        asked, window = self._num_allowed(), self.limits.context_tokens
        return min(asked, window - len(prompt_ids)) if window and self.turns else asked

    def _num_allowed(self) -> int:
        """Tokens that the next turn may take by the request."""
        return self.params.max_new_tokens - (0 if self.limits.calls is None else count_sampled(self.turns))

    async def _sampled(self, prompt_ids: tuple[int, ...], room: int) -> Completion:
        number, request = len(self.turns), self.request
        context = request.context(number, has_more=self.limits.max_turns > 1)
        params = replace(self.params, seed=request.seed + number, max_new_tokens=room)
        completion = await self.policy.generate(prompt_ids, params, context, self.on_first_token)
        if completion.finish_reason == "abort":
            raise RolloutAborted(f"the request {context.request_id} was aborted")
        return completion

    async def _stepped(self, turn: Turn, is_last: bool) -> tuple[Observation, Turn]:
        """The environment's answer to a turn, and the turn completed by it."""
        text = turn.completion.answer
        parsed = read_answer(self.renderer, text, turn.completion.stop_text, self.tools)
        action = Action(
            text=text,
            content=parsed.content,
            tool_calls=parsed.tool_calls,
            errors=parsed.errors,
            turn=len(self.turns),
            is_last=is_last,
        )
        refused: Sequence[ToolCall] = ()
        if (budget := self.limits.calls) is not None:
            if is_last and (parsed.tool_calls or parsed.errors):
                return Observation(done=True), replace(turn, tool_calls=parsed.tool_calls, faults=(OVER_BUDGET,))
            num_left = budget.max_calls - count_calls(self.turns)
            left_s = max(0.0, budget.max_s - sum(one.env_s for one in self.turns))
            action = replace(action, tool_calls=parsed.tool_calls[:num_left], left_s=left_s)
            refused = parsed.tool_calls[num_left:]
        clock = asyncio.get_running_loop()
        begun_s = clock.time()
        try:
            observation = await self.env.step(action)
            self._keep_state(observation.saved, "step")
        except PolicyFault as fault:
            observation = replace(after_fault(action, fault), state_key=self.state_key)
        if refused:
            observation = replace(
                observation,
                messages=(*observation.messages, *map(refuse_call, refused)),
                faults=(*observation.faults, OVER_BUDGET),
            )
        if not observation.messages and not observation.done:
            raise EnvFault("step returned no messages, and didn't end the episode: return done=True", "protocol")
        self.state_key = observation.state_key
        return observation, replace(
            turn,
            tool_calls=parsed.tool_calls,
            replies=tuple(observation.messages),
            rewards=dict(observation.rewards),
            faults=tuple(observation.faults),
            env_s=round(clock.time() - begun_s, DECIMALS_S) if self.limits.timed else 0.0,
        )


def read_answer(renderer: TurnRenderer, text: str, stop_text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """The calls in an answer, and its text without them. The stop string may be a part of a call, and isn't shown."""
    if not tools:
        return ParsedTurn(content=text)
    parsed = renderer.parse(text + stop_text, tools)
    return replace(parsed, content=parsed.content.removesuffix(stop_text)) if stop_text else parsed


def refuse_call(call: ToolCall) -> Message:
    text = f"{call.name} was not called: no calls are left"
    return Message(role="tool", content=text, name=call.name, tool_call_id=call.call_id)


def after_fault(action: Action, fault: PolicyFault) -> Observation:
    """The end, if the fault ends the episode. Otherwise what the policy reads about it: a tool's result after a call, a
    user's message without one.
    """
    if fault.ends:
        return Observation(done=True, faults=(fault.kind,))
    text, calls = str(fault), action.tool_calls
    messages = [Message(role="tool", content=text, name=call.name, tool_call_id=call.call_id) for call in calls]
    return Observation(messages=messages or [Message(role="user", content=text)], faults=(fault.kind,))


ONE_TURN = EpisodeLimits(max_turns=1)


class SingleTurn:
    """Shows the prompt's messages; the policy's first turn ends the episode."""

    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=episode.prompt.messages)

    async def step(self, action: Action) -> Observation:
        return Observation(done=True)

    async def close(self) -> None:
        """It holds nothing."""


async def play_single_turn(
    request: RolloutRequest,
    prompt: Prompt,
    policy: Generates,
    renderer: TurnRenderer,
    params: SamplingParams,
    on_first_token: Callable[[], None] = ignore_first_token,
) -> Rollout:
    """Play a rollout of one turn, whatever the environment of the run is. Raises as `play` does."""
    return await play(request, prompt, SingleTurn(), policy, renderer, params, ONE_TURN, on_first_token)
