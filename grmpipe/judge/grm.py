"""The GRM as a judge sees it: what a question weighs, and one answer to it. Here or outside; it reads no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from grmpipe.judge.markup import Markup
from models.types import ChatEngine, Completion, Engine, Message, RequestContext, SamplingParams
from scheduler.clock import ActiveClock
from scheduler.events import EventSink

BYTES_PER_TOKEN = 4  # of English prose, roughly, for whoever can't count


class PromptRenderer(Protocol):
    """What judging needs of a tokenizer with a chat template."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmPrompt:
    """What the GRM is sent. `token_ids` are empty where somebody else makes them."""

    text: str
    token_ids: tuple[int, ...]
    num_tokens: int


class Grm(Protocol):
    """`context_tokens`: its window; 0 where it isn't known."""

    name: str
    context_tokens: int

    def shown(self, text: str) -> str:
        """A text of the policy, as a prompt may spell it."""
        ...

    def prompt(self, text: str) -> GrmPrompt: ...

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Around `ask`: raises TimeoutError when the GRM had so long to answer."""
        ...

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        """Sample one judgement. Raises EngineRefused or EngineDied."""
        ...


class LocalGrm:
    """Served by an engine of ours, which may be a router of many: we make its token ids.

    clock: times its answers; it stands still while all its engines are being replaced.
    """

    def __init__(
        self, name: str, engine: Engine, renderer: PromptRenderer, context_tokens: int, clock: ActiveClock | None = None
    ) -> None:
        self.name = name
        self.context_tokens = context_tokens
        self._engine = engine
        self._renderer = renderer
        self._clock = clock

    def shown(self, text: str) -> str:
        return text  # our renderer never takes text for markup

    def prompt(self, text: str) -> GrmPrompt:
        token_ids = self._renderer.render((Message(role="user", content=text),))
        return GrmPrompt(text=text, token_ids=token_ids, num_tokens=len(token_ids))

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds) if self._clock is None else self._clock.timeout(seconds)

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        return await self._engine.generate(prompt.token_ids, params, context)


class RemoteGrm:
    """Behind somebody's endpoint: it takes messages, and shows a text and a count of tokens.

    context_tokens: 0 leaves it to the endpoint to refuse what doesn't fit; else prompts are weighed by their bytes.
    markup: is broken in texts of the policy: the endpoint's tokenizer may take it for its own.
    """

    def __init__(self, name: str, engine: ChatEngine, context_tokens: int, events: EventSink, markup: Markup) -> None:
        self.name = name
        self.context_tokens = context_tokens
        self._engine = engine
        self._events = events
        self._markup = markup

    def shown(self, text: str) -> str:
        return self._markup.broken(text)

    def prompt(self, text: str) -> GrmPrompt:
        return GrmPrompt(text=text, token_ids=(), num_tokens=estimated_tokens(text))

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds)

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        completion = await self._engine.chat((Message(role="user", content=prompt.text),), params, context)
        num_tokens = completion.num_tokens
        self._events.span(self.name, context.role, start_s, clock(), request=context.request_id, num_tokens=num_tokens)
        return completion


def estimated_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8")) // BYTES_PER_TOKEN)
