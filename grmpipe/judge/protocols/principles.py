"""The principles of a prompt: what the judge wants of an answer. Written before any answer or in each judgement."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from grmpipe.judge.grm_client import GrmClient
from grmpipe.judge.prompt import PrinciplesPrompt, with_texts
from grmpipe.judge.verdict import make_failure
from grmpipe.models.types import Completion
from grmpipe.types import Failed, FailedJudgement, JudgeReport, JudgeTask, Prompt


class Principles:
    """The principles of one group: one text for all siblings. The first caller requests it, the others wait for it; so
    no limit of concurrency can deadlock.

    A failure isn't kept: the next caller tries again, with other seeds. Only what a greedy judge can't write is.

    template: asks for them; None: they are part of each judgement, and no text is written before.
    """

    def __init__(self, client: GrmClient, template: PrinciplesPrompt | None, prompt: Prompt, group_id: str) -> None:
        self._client = client
        self._template = template
        self._prompt = prompt
        self._group_id = group_id
        self._writing = asyncio.Lock()
        self._written: Completion | None = None
        self._unwritable: FailedJudgement | None = None
        self._num_tries = 0
        self._unreported: Completion | None = None

    def judge_tasks(self) -> Sequence[JudgeTask]:
        """Judge tasks to do before any rollout has ended."""
        return () if self._template is None else (JudgeTask(members=()),)

    async def text(self, priority: int) -> str | Failed | None:
        """The text for the judge's prompts. None if there is none to show."""
        if self._template is None:
            return None
        async with self._writing:
            if self._unwritable is not None:
                return self._unwritable
            if self._written is None:
                answer = await self._write(self._template, priority)
                if isinstance(answer, FailedJudgement) and self._client.is_greedy:
                    self._unwritable = answer
                if isinstance(answer, Failed):
                    return answer
                self._written = self._unreported = answer
        return self._written.answer.strip()

    def add_to(self, report: JudgeReport) -> JudgeReport:
        """The report with the completion that wrote the principles, if no earlier report had it."""
        unreported, self._unreported = self._unreported, None
        return report if unreported is None else replace(report, principles=unreported)

    async def _write(self, template: PrinciplesPrompt, priority: int) -> Completion | Failed:
        try:
            asked = with_texts(self._prompt, self._client.grm.escape_text)
            asked_for = self._client.grm.prompt(template.render(asked))
        except ValueError as error:
            return make_failure("refused", str(error))
        room = self._client.room_for_principles
        if room is not None and asked_for.num_tokens > room:
            return make_failure("too_long", f"principles: {asked_for.num_tokens} tokens; the limit is {room}")
        name = f"{self._group_id}/principles/{self._num_tries}"
        self._num_tries += 1
        return await self._client.text(name, self._group_id, asked_for, priority)
