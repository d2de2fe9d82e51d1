"""Texts before a judge that no policy of this run wrote: labelled responses, canaries. Keeps and decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grmpipe.types import Failed, Judge, JudgeReport, Prompt, Rollout, Turn
from models.types import Completion, VersionSpan

NOBODY = VersionSpan(model="nobody", version=0, start=0, end=0)


def written(group_id: str, sibling: int, text: str) -> Rollout:
    """A text as a rollout. It has no tokens: nothing can be trained on it."""
    completion = Completion(token_ids=(), logprobs=(), text=text, finish_reason="stop", versions=(NOBODY,))
    turn = Turn(prompt_ids=(), completion=completion)
    return Rollout(group_id=group_id, sibling=sibling, turns=(turn,), status="finished")


async def judge_together(
    judge: Judge, prompt: Prompt, group_id: str, texts: Sequence[str], priority: int = 0
) -> tuple[JudgeReport, ...]:
    """The reports on all texts, in their order, as on the siblings of one group. The lowest priority goes first.

    The group id makes the judgements: under the same one the same engine gives the same. What the judge doesn't report
    on has failed as refused: one that compares can't take a text by itself.
    """
    hearing = judge.open(prompt, group_id, len(texts))
    sittings = list(hearing.begin())
    for sibling, text in enumerate(texts):
        sittings += hearing.add(written(group_id, sibling, text))
    reports: dict[int, JudgeReport] = {}
    for final in await asyncio.gather(*(hearing.judge(sitting, priority) for sitting in sittings)):
        reports |= final
    return tuple(reports[sibling] if sibling in reports else not_taken() for sibling in range(len(texts)))


def not_taken() -> JudgeReport:
    failure = Failed(stage="judge", cause="refused", attempts=0, detail="this judge compares: one response is too few")
    return JudgeReport(verdict=failure, failures=(failure,))
