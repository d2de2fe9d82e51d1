"""A renderer whose tokens can be read, for tests that play episodes."""

from __future__ import annotations

from collections.abc import Sequence

from grmpipe.models.types import Message, ParsedTurn, ToolSpec


class Letters:
    """Renders a message as its characters' codes."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message.content)

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        return (0, *self.render(replies), 0)

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        return ParsedTurn(content=text)
