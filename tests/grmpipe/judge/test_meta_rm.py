"""The meta-RM reads what the GRM read and wrote, and gives probabilities."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from grmpipe.algorithm.advantages import sigmoid
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.models.types import Completion, EngineRefused, VersionSpan
from grmpipe.types import Judgement


class Recorded:
    """Scores a sequence by its length, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []

    async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
        self.asked.append((tuple(token_ids), priority))
        return float(len(token_ids) - 4)


def judged(prompt_ids: tuple[int, ...], sampled_ids: tuple[int, ...]) -> Judgement:
    span = VersionSpan(model="grm", version=0, start=0, end=len(sampled_ids))
    completion = Completion(
        token_ids=sampled_ids, logprobs=(0.0,) * len(sampled_ids), text="", finish_reason="stop", versions=(span,)
    )
    return Judgement(
        group_id="g", siblings=(0,), scores=(5.0,), prompt_ids=prompt_ids, completion=completion, grm="grm", version=0
    )


def test_meta_rm_reads_the_grms_prompt_and_then_its_sampled_answer() -> None:
    scorer = Recorded()
    meta = MetaRm(scorer=scorer, context_tokens=10)
    scores = asyncio.run(meta.scores([judged((1, 2), (3, 4)), judged((1,), (2, 3, 4, 5))], priority=-3))
    assert scorer.asked == [((1, 2, 3, 4), -3), ((1, 2, 3, 4, 5), -3)]
    assert scores == [0.5, pytest.approx(1 / (1 + math.exp(-1)))]


def test_a_judgement_beyond_its_window_is_refused_and_nothing_is_asked() -> None:
    scorer = Recorded()
    with pytest.raises(EngineRefused, match="a judgement of 5 tokens; the context window of meta has 4"):
        asyncio.run(MetaRm(scorer=scorer, context_tokens=4).scores([judged((1,), (2,)), judged((1, 2), (3, 4, 5))]))
    assert scorer.asked == []


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused_and_becomes_no_weight(logit: float) -> None:
    class Broken(Recorded):
        async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
            return logit if len(token_ids) == 3 else 0.0

    meta = MetaRm(scorer=Broken(), context_tokens=9)
    with pytest.raises(EngineRefused, match="isn't finite"):
        asyncio.run(meta.scores([judged((1,), (2,)), judged((1,), (2, 3))]))


def test_missing_judgement_gives_no_score() -> None:
    assert list(asyncio.run(MetaRm(scorer=Recorded(), context_tokens=4).scores([]))) == []


def test_a_sure_model_doesnt_overflow() -> None:
    assert sigmoid(1000.0) == 1.0 and sigmoid(-1000.0) == 0.0
    assert sigmoid(-2.0) == pytest.approx(1 - sigmoid(2.0))
