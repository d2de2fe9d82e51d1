"""Texts before a judge that no policy of this run wrote: labelled responses, canaries. Keeps and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from grmpipe.judge.base import judge_group
from grmpipe.types import Judge, JudgeReport, Prompt, Rollout, Turn
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
    """The reports on all texts, in their order, as on the siblings of one group (see judge_group).

    The group id makes the judgements: under the same one the same engine gives the same.
    """
    return await judge_group(judge, prompt, [written(group_id, i, text) for i, text in enumerate(texts)], priority)
