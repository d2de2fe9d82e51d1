"""An engine that says what a test wants, a tokenizer of characters, and recorders with both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from grmpipe.envs.play import EpisodeLimits, RolloutRequest
from grmpipe.models.types import (
    Completion,
    Message,
    ParsedTurn,
    RequestContext,
    SamplingParams,
    ToolCall,
    ToolSpec,
    VersionSpan,
    ignore_first_token,
)
from grmpipe.scheduler.events import EventSink
from grmpipe.workflows.episode_chat import EpisodeChats

ROLES = {"system": -1, "user": -2, "assistant": -3, "tool": -4}
END, TOOLS = -9, -8


class Characters:
    """A tokenizer of characters: each message begins with a number for its role, and ends with one."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        for message in messages:
            if message.content == "markup":
                raise ValueError("chat_template: it takes no markup")
        return (*(TOOLS for _ in tools), *self._rest(messages))

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        return (*(() if ended else (END,)), *self._rest(replies))

    def decode_special(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        """`add 1 2` is a call, `bad` is one that can't be read."""
        assert tools
        if text.startswith("bad"):
            return ParsedTurn(content="", errors=("no JSON",))
        words = text.split()
        if words[:1] != ["add"]:
            return ParsedTurn(content=text)
        arguments = {"a": int(words[1]), "b": int(words[2])}
        return ParsedTurn(content="", tool_calls=(ToolCall(name="add", arguments=arguments),))

    def _rest(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids = [id_ for one in messages for id_ in (ROLES[one.role], *map(ord, one.content), *calls(one), END)]
        return (*ids, ROLES["assistant"])


def calls(message: Message) -> list[int]:
    return [ord(one) for call in message.tool_calls for one in f"{call.name}{dict(call.arguments)}"]


@dataclass
class FakeEngine:
    """Says the texts in order, then "over"; waits while `held` is clear; fails with `error`."""

    texts: Sequence[str] = ()
    error: Exception | None = None
    asked: list[tuple[tuple[int, ...], SamplingParams, RequestContext]] = field(default_factory=list)
    said: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)  # prompt, completion
    held: asyncio.Event | None = None
    aborted: int = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        number = len(self.asked)
        self.asked.append((tuple(prompt_ids), params, context))
        if self.held is not None:
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        if self.error is not None:
            raise self.error
        on_first_token()
        whole = self.texts[number] if number < len(self.texts) else "over"
        stop_text = next((string for string in params.stop if string in whole), "")
        shown, ended, _ = whole.partition(stop_text) if stop_text else (whole, "", "")
        whole = shown + ended
        ids = tuple(map(ord, whole))[: params.max_new_tokens]
        text = shown[: params.max_new_tokens]
        self.said.append((tuple(prompt_ids), ids))
        return Completion(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            text=text,
            finish_reason="stop" if len(ids) == len(whole) else "length",
            stop_text=stop_text,
            versions=(VersionSpan(model="policy", version=0, start=0, end=len(ids)),),
        )


REQUEST = RolloutRequest(group_id="g", sibling=1, seed=50)


@pytest.fixture
def make_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def make_chats() -> Callable[..., EpisodeChats]:
    def make(
        engine: FakeEngine,
        *,
        max_turns: int = 20,
        context_tokens: int = 0,
        max_new_tokens: int = 50,
        episode_s: float = 60.0,
        events: EventSink | None = None,
    ) -> EpisodeChats:
        limits = EpisodeLimits(max_turns=max_turns, context_tokens=context_tokens, episode_s=episode_s)
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.7, top_p=0.9)
        return EpisodeChats(engine, Characters(), params, limits, events)

    return make


@pytest.fixture
def request_of() -> RolloutRequest:
    return REQUEST
