"""What a judge wants of the answers to a prompt, written before there are any. One text for all siblings."""

from __future__ import annotations

import asyncio

from grmpipe.judge.asking import Asker
from grmpipe.judge.prompt import PrinciplesPrompt
from grmpipe.types import Failed, Prompt
from models.types import Completion


class Principles:
    """Of one group. Whoever comes first has them written, the others wait for it; so no width can deadlock.

    A failure isn't kept: who comes next tries again, under other seeds.
    """

    def __init__(
        self, asker: Asker, template: PrinciplesPrompt, room: int | None, prompt: Prompt, group_id: str
    ) -> None:
        """room: tokens that its prompt may have; None where the window isn't known."""
        self._asker = asker
        self._template = template
        self._room = room
        self._prompt = prompt
        self._group_id = group_id
        self._writing = asyncio.Lock()
        self._written: Completion | None = None
        self._num_tries = 0
        self._untold: Completion | None = None

    async def text(self, priority: int) -> str | Failed:
        async with self._writing:
            if self._written is None:
                answer = await self._write(priority)
                if isinstance(answer, Failed):
                    return answer
                self._written = self._untold = answer
        return self._written.text.strip()

    def take_untold(self) -> Completion | None:
        """What was written, once: for the report of the first sibling that has one."""
        untold, self._untold = self._untold, None
        return untold

    async def _write(self, priority: int) -> Completion | Failed:
        try:
            asked_for = self._asker.grm.prompt(self._template.render(self._prompt))
        except ValueError as error:
            return Failed(stage="judge", cause="refused", attempts=0, detail=str(error))
        if self._room is not None and asked_for.num_tokens > self._room:
            detail = f"principles: {asked_for.num_tokens} tokens; there is room for {self._room}"
            return Failed(stage="judge", cause="too_long", attempts=0, detail=detail)
        name = f"{self._group_id}/principles/{self._num_tries}"
        self._num_tries += 1
        return await self._asker.text(name, self._group_id, asked_for, priority)
