"""The GRM as a judge sees it, local or remote: the size of a prompt, and one answer to it."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from grmpipe.judge.markup import Markup
from grmpipe.models.chat.thinking import KNOWN_MARKERS, ThinkingMarkers, thinks
from grmpipe.models.engines.endpoint_use import NoRequestLog
from grmpipe.models.types import (
    ChatEngine,
    Completion,
    Generates,
    Message,
    RequestContext,
    RequestLog,
    SamplingParams,
    Usage,
)
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.work_queue import BusyMeter

BYTES_PER_TOKEN = 4  # rough value for English prose, for a GRM without a tokenizer here


class PromptRenderer(Protocol):
    """What judging needs of a tokenizer with a chat template."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmPrompt:
    """A prompt for the GRM. `token_ids` are empty if a remote endpoint tokenizes."""

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    num_tokens: int


class Grm(Protocol):
    """A GRM to ask. `context_tokens`: its context window; 0 if unknown. `thinking`: of its thoughts, if it has any."""

    name: str
    context_tokens: int
    thinking: ThinkingMarkers | None

    @property
    def thinks(self) -> bool:
        """Whether it may think before an answer, and its thoughts can be ended."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request in flight."""
        ...

    def escape_text(self, text: str) -> str:
        """A text of the policy, escaped as this GRM's prompts need it."""
        ...

    def prompt(self, messages: Sequence[Message]) -> GrmPrompt: ...

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Context around `ask`: raises TimeoutError after `seconds`, on the GRM's clock."""
        ...

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        """Sample one judgement. Raises EngineRefused or EngineDied."""
        ...


class MeteredGrm:
    """What both kinds of GRM have in common: the time in which they are asked."""

    def __init__(self, name: str, context_tokens: int) -> None:
        self.name = name
        self.context_tokens = context_tokens
        self._meter: BusyMeter | None = None

    @property
    def busy_s(self) -> float:
        return self._meter.busy_s if self._meter is not None else 0.0

    def _in_flight(self) -> BusyMeter:
        """Context around a request. The meter needs the event loop, and so begins with the first request."""
        if self._meter is None:
            self._meter = BusyMeter()
        return self._meter


class LocalGrm(MeteredGrm):
    """A GRM on an engine of this run, which may be a router of many. Token ids are made here.

    clock:    times its answers; stands still while all its engines are being replaced.
    thinking: of a model whose engine marks the thoughts in its completions.
    requests: told of each request.
    """

    def __init__(
        self,
        name: str,
        engine: Generates,
        renderer: PromptRenderer,
        context_tokens: int,
        clock: ActiveClock | None = None,
        thinking: ThinkingMarkers | None = None,
        requests: RequestLog | None = None,
    ) -> None:
        super().__init__(name, context_tokens)
        self._engine = engine
        self._requests = requests or NoRequestLog()
        self.thinking = thinking
        self._renderer = renderer
        self._clock = clock

    @property
    def thinks(self) -> bool:
        return thinks(self.thinking)

    def escape_text(self, text: str) -> str:
        return text  # our renderer never reads text as markup

    def prompt(self, messages: Sequence[Message]) -> GrmPrompt:
        token_ids = self._renderer.render(messages)
        return GrmPrompt(messages=tuple(messages), token_ids=token_ids, num_tokens=len(token_ids))

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds) if self._clock is None else self._clock.timeout(seconds)

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        number = self._requests.begin_request(retry=context.is_retry)
        with self._in_flight():
            completion = await self._engine.generate(prompt.token_ids, params, context)
        self._requests.end_request(number, Usage(prompt=prompt.num_tokens, sampled=completion.num_tokens))
        return completion


class RemoteGrm(MeteredGrm):
    """A GRM behind an endpoint. It takes messages, and returns a text and a count of tokens.

    context_tokens: 0 lets the endpoint refuse what doesn't fit; otherwise prompts are measured by their bytes.
    markup: broken in texts of the policy, because the endpoint's tokenizer could read it as its own.
    thinking_markers: around thoughts that the endpoint doesn't separate from the answer.
    """

    def __init__(
        self,
        name: str,
        engine: ChatEngine,
        context_tokens: int,
        events: EventSink,
        markup: Markup,
        thinking_markers: Sequence[str] | None = None,
    ) -> None:
        super().__init__(name, context_tokens)
        self.thinking = remote_markers(thinking_markers)
        self._engine = engine
        self._events = events
        self._markup = markup
        self._own_markup = Markup([re.escape(marker) for marker in thinking_markers or ()])

    @property
    def thinks(self) -> bool:
        return False  # an endpoint takes messages, so a thought can't be ended here

    def escape_text(self, text: str) -> str:
        return self._own_markup.break_markup(self._markup.break_markup(text))

    def prompt(self, messages: Sequence[Message]) -> GrmPrompt:
        num_tokens = sum(estimate_tokens(message.content) for message in messages)
        return GrmPrompt(messages=tuple(messages), token_ids=(), num_tokens=num_tokens)

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds)

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        with self._in_flight():
            completion = await self._engine.chat(prompt.messages, params, context)
        num_tokens = completion.num_tokens
        self._events.span(self.name, context.role, start_s, clock(), request=context.request_id, num_tokens=num_tokens)
        return self._with_thought(completion)

    def _with_thought(self, completion: Completion) -> Completion:
        """The endpoint's template, which isn't known here, may open the thought: its end shows that there is one."""
        if self.thinking is None:
            return completion
        markers = replace(self.thinking, in_prompt=self.thinking.close in completion.text)
        return replace(completion, thought_chars=markers.split_thought(completion.text).num_chars)


def remote_markers(declared: Sequence[str] | None) -> ThinkingMarkers | None:
    """The markers of a model behind an endpoint: the declared ones, or the usual ones; None if there are none."""
    if declared is not None and not declared:
        return None
    opening, closing = declared or KNOWN_MARKERS[0]
    return ThinkingMarkers(open=opening, close=closing)


def estimate_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8")) // BYTES_PER_TOKEN)
