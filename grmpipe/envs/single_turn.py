"""The environment of one question and one answer. Never replies."""

from __future__ import annotations

from grmpipe.types import Prompt
from models.types import Message


class SingleTurn:
    """Shows the prompt's messages; the policy's first turn ends the episode."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def start(self) -> tuple[Message, ...]:
        return self._prompt.messages

    async def step(self, text: str) -> tuple[Message, ...]:
        return ()
