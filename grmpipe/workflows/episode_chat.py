"""Records the chat of one episode: what the engine saw and sampled, id by id. Sampled ids are never tokenized again.

messages -> extend a recorded conversation: its ids + extend(what is new)    -> sample -> parse -> reply
         -> anything else: a new segment, the whole prompt rendered again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from grmpipe.envs.limited_env import LANE
from grmpipe.envs.play import (
    DECIMALS_S,
    EpisodeLimits,
    RolloutAborted,
    RolloutRequest,
    read_answer,
)
from grmpipe.models.chat.chat_template import count_chars, off_loop_if_long
from grmpipe.models.types import (
    Completion,
    Generates,
    Message,
    ParsedTurn,
    SamplingParams,
    ToolCall,
    ToolSpec,
    ignore_first_token,
)
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.workflows.chat import ChatOptions, ChatRefused, ChatReply, TokenLogprob
from grmpipe.workflows.outcome import COMPLETION_ID
from grmpipe.workflows.recorded_calls import RecordedCall, find_continued_call

if TYPE_CHECKING:
    from grmpipe.models.chat.renderer import Renderer

log = logging.getLogger(__name__)

REMEMBERED_TOOL_LISTS = 64
AS_THE_RUN = ChatOptions()
FINAL = ("turn_limit_exceeded", "time_limit_exceeded")  # refusals that no later request of the episode escapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """The prompt of a call that is about to begin. new_ids: after those of the parent."""

    parent: RecordedCall | None
    prompt_ids: tuple[int, ...]
    new_ids: tuple[int, ...]


class EpisodeChats:
    """Opens the chats of episodes: what those of a run have in common.

    events: gets a span for each time in which a workflow doesn't ask the policy, as for an environment's stages.
    """

    def __init__(
        self,
        engine: Generates,
        renderer: Renderer,
        params: SamplingParams,
        limits: EpisodeLimits,
        events: EventSink | None = None,
    ) -> None:
        self.events = events or NoEvents()
        self.engine = engine
        self.renderer = renderer
        self.params = params
        self.limits = limits
        self._tool_lists: dict[bytes, tuple[ToolSpec, ...]] = {}

    def open(self, request: RolloutRequest, on_first_token: Callable[[], None] = ignore_first_token) -> EpisodeChat:
        return EpisodeChat(self, request, on_first_token)

    def same_tools(self, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """Equal lists of tools as one and the same: renderers remember them by their identity."""
        key = msgspec.json.encode(tools)
        if key not in self._tool_lists and len(self._tool_lists) >= REMEMBERED_TOOL_LISTS:
            self._tool_lists.clear()
        return self._tool_lists.setdefault(key, tuple(tools))


class EpisodeChat:
    """The calls of one episode, which may be made in parallel.

    calls:   those that were answered, in the order of their answers.
    refusal: the latest, unless another request was answered since; of the turns or the time it stays.
    failed:  gets the exception that ends the episode: of the engine, or a programming error.
    """

    def __init__(self, chats: EpisodeChats, request: RolloutRequest, on_first_token: Callable[[], None]) -> None:
        self._chats = chats
        self.limits = chats.limits
        self._request = request
        self._on_first_token = on_first_token
        self._clock = asyncio.get_running_loop()
        self._idle_since_s = self._clock.time()
        self._end_s = self._idle_since_s + chats.limits.episode_s
        self._num_started = 0
        self._num_tool_calls = 0
        self._sampling: set[asyncio.Task[Completion]] = set()
        self._ended = False
        self.boot_s = 0.0
        self.calls: list[RecordedCall] = []
        self.refusal: ChatRefused | None = None
        self.failed: asyncio.Future[object] = self._clock.create_future()

    @property
    def idle_s(self) -> float:
        """Time since the policy was last being asked."""
        return 0.0 if self._sampling else self._clock.time() - self._idle_since_s

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), options: ChatOptions = AS_THE_RUN
    ) -> ChatReply:
        """The policy's reply. Raises ChatRefused."""
        try:
            reply = await self._answered(tuple(messages), self._chats.same_tools(tools), options)
        except ChatRefused as refused:
            self.refusal = refused
            raise
        if self.refusal is not None and self.refusal.code not in FINAL:
            self.refusal = None
        return reply

    def end(self) -> None:
        """End the chat: calls in flight are aborted and not recorded, later ones are refused."""
        if not self._ended:
            self._ended = True
            if not self._sampling:
                self._add_idle_time()
            for task in self._sampling:
                task.cancel()
            if not self.failed.cancel() and not self.failed.cancelled():
                self.failed.exception()  # it was read: asyncio would complain otherwise

    async def _answered(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], options: ChatOptions
    ) -> ChatReply:
        self._check_open()
        prompted = await self._prompted(messages, tools)
        self._check_open()  # meanwhile the episode may have ended, or other calls have used up its turns
        params = merge_params(self._chats.params, options)
        room = room_in(self.limits.context_tokens, prompted.prompt_ids, params.max_new_tokens)
        number = self._num_started
        self._num_started += 1
        window_is_bound = room < params.max_new_tokens
        params = replace(params, seed=self._request.seed + number, max_new_tokens=room)
        completion = await self._sampled(prompted.prompt_ids, number, params)
        reply = self._recorded(number, messages, tools, prompted, completion, window_is_bound=window_is_bound)
        return replace(reply, logprobs=list_logprobs(self._chats.renderer, completion)) if options.logprobs else reply

    def _check_open(self) -> None:
        """Raises ChatRefused if the episode has ended, or used up its turns or its time."""
        limits = self.limits
        if self._ended or self.failed.done():
            raise ChatRefused("session_ended", "the episode has ended: its policy answers no further request")
        if len(self.calls) + len(self._sampling) >= limits.max_turns:
            raise ChatRefused(
                "turn_limit_exceeded", f"the episode has used up its turns (rollout.max_turns = {limits.max_turns})"
            )
        if self._clock.time() >= self._end_s:
            raise ChatRefused(
                "time_limit_exceeded", f"the episode has used up its time (env.episode_s = {limits.episode_s:g} s)"
            )

    async def _prompted(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Prompted:
        """Raises ChatRefused for messages or tools that the chat template doesn't take."""
        renderer = self._chats.renderer
        try:
            if tools:
                renderer.parse("", tools)  # an unknown format is refused before anything is sampled
            if (parent := find_continued_call(self.calls, messages, tools)) is not None:
                new = messages[len(parent.conversation) :]
                try:
                    extend = partial(renderer.extend, new, tools, ended=not parent.completion.stop_text)
                    new_ids = await off_loop_if_long(count_chars(new), extend)
                except ValueError as error:  # such as a template that moves the tools
                    log.info("%s: rendered again, since %s", self._request.trajectory_id, error)
                else:
                    prompt_ids = (*parent.prompt_ids, *parent.completion.token_ids, *new_ids)
                    return Prompted(parent=parent, prompt_ids=prompt_ids, new_ids=new_ids)
            prompt_ids = await off_loop_if_long(count_chars(messages), partial(renderer.render, messages, tools))
        except ValueError as error:
            raise ChatRefused("invalid_request", str(error)) from error
        return Prompted(parent=None, prompt_ids=prompt_ids, new_ids=prompt_ids)

    async def _sampled(self, prompt_ids: tuple[int, ...], number: int, params: SamplingParams) -> Completion:
        """Raises ChatRefused if the chat ended meanwhile, or if the engine failed: then the episode has."""
        context = self._request.context(number, has_more=self.limits.max_turns > 1)
        if not self._sampling:
            self._add_idle_time()
        generating = self._chats.engine.generate(prompt_ids, params, context, self._on_first_token)
        task = asyncio.ensure_future(generating)
        self._sampling.add(task)
        try:
            completion = await task
            if completion.finish_reason == "abort":
                raise RolloutAborted(f"the request {context.request_id} was aborted")
        except asyncio.CancelledError:
            if self._ended:
                raise ChatRefused("session_ended", "the episode ended before the policy had answered") from None
            raise
        except Exception as error:  # of the engine, or ours: it is raised where the episode is played
            self._fail(error)
            raise ChatRefused("policy_unavailable", "the policy can't answer: the episode ends") from error
        finally:
            self._sampling.discard(task)
            self._idle_since_s = self._clock.time()
        return completion

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _add_idle_time(self) -> None:
        """Count the time in which the policy wasn't asked for the call before it."""
        idle_s = round(self.idle_s, DECIMALS_S)
        self._chats.events.span(
            LANE,
            "step" if self.calls else "open",
            self._idle_since_s,
            self._clock.time(),
            episode=f"{self._request.group_id}/{self._request.sibling}",
            **{"turn": len(self.calls) - 1} if self.calls else {"attempt": self._request.attempt},
        )
        if self.calls:
            self.calls[-1].env_s += idle_s
        else:
            self.boot_s += idle_s

    def _recorded(
        self,
        number: int,
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...],
        prompted: Prompted,
        completion: Completion,
        *,
        window_is_bound: bool,
    ) -> ChatReply:
        parsed = parse_for_workflow(self._chats.renderer, completion, tools)
        reply = ChatReply(
            role="assistant",
            content=parsed.content,
            tool_calls=tuple(map(self._with_id, parsed.tool_calls)),
            completion_id=f"{COMPLETION_ID}{self._request.trajectory_id}/t{number}",
            finish_reason=completion.finish_reason,
            prompt_tokens=len(prompted.prompt_ids),
            completion_tokens=len(completion.token_ids),
        )
        call = RecordedCall(
            number=number,
            messages=messages,
            tools=tools,
            parent=prompted.parent,
            prompt_ids=prompted.prompt_ids,
            new_ids=prompted.new_ids,
            completion=completion,
            reply=reply,
            window_is_bound=window_is_bound,
            faults=tuple("malformed" for _ in parsed.errors),
        )
        self.calls.append(call)
        return reply

    def _with_id(self, call: ToolCall) -> ToolCall:
        self._num_tool_calls += 1
        return replace(call, call_id=f"call_{self._num_tool_calls}")


def merge_params(params: SamplingParams, options: ChatOptions) -> SamplingParams:
    """The run's parameters, with what the call asks for. Raises ChatRefused."""
    if "" in options.stop:
        raise ChatRefused("invalid_request", "stop: a text is empty, and would end every reply at once")
    if options.stop and params.thinking is not None:
        raise ChatRefused(
            "invalid_request",
            "stop: a text may cross the border between a thought that was ended and the answer; ask without, or type "
            "rollout.thinking_budget_tokens=0",
        )
    limit = params.max_new_tokens if options.max_tokens is None else options.max_tokens
    if limit < 1:
        raise ChatRefused("invalid_request", f"max_tokens: must be at least 1, got {limit}")
    limit = min(limit, params.max_new_tokens)
    return replace(params, stop=params.stop + options.stop, max_new_tokens=limit)


def room_in(window: int, prompt_ids: Sequence[int], asked: int) -> int:
    """Tokens that the completion may have. Raises ChatRefused if the window is full."""
    room = min(asked, window - len(prompt_ids)) if window else asked
    if room < 1:
        raise ChatRefused(
            "context_length_exceeded",
            f"the context window has {window} tokens, and the messages take {len(prompt_ids)}: shorten them",
        )
    return room


def parse_for_workflow(renderer: Renderer, completion: Completion, tools: tuple[ToolSpec, ...]) -> ParsedTurn:
    """What the workflow reads. Calls in a completion that was cut are never read; those that can't be read stay
    text.
    """
    parsed = read_answer(
        renderer, completion.answer, completion.stop_text, tools if completion.finish_reason == "stop" else ()
    )
    return parsed if parsed.tool_calls else replace(parsed, content=completion.answer)


def list_logprobs(renderer: Renderer, completion: Completion) -> tuple[TokenLogprob, ...]:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return tuple(
        TokenLogprob(token=renderer.decode_special([token_id]), logprob=logprob) for token_id, logprob in pairs
    )
