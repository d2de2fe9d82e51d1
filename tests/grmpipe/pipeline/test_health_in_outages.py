"""The breaker beside training counts outages of the judge, and nothing else that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from grmpipe.judge.pointwise_adapter import PointwiseAdapter, judge_together
from grmpipe.judge.verdict import make_failure
from grmpipe.pipeline.health import OutageBreaker, ServiceHealth, Unfit
from grmpipe.types import Cause, JudgeReport, Prompt, Rollout

ASKED = Prompt(prompt_id="p", messages=())


class Fails:
    def __init__(self, cause: Cause, attempts: int) -> None:
        self.num_asked = 0
        self._failed = make_failure(cause, "why", attempts)

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        self.num_asked += 1
        return JudgeReport(verdict=self._failed)


def health() -> ServiceHealth:
    return ServiceHealth(
        "judging", max_failure_rate=0.2, window=8, pause_s=0.01, counted="verdicts", key="judge.max_failure_rate"
    )


def ask(judge: Fails, times: int, also: Callable[[OutageBreaker], None] = lambda breaker: None) -> None:
    async def asked() -> None:
        breaker = OutageBreaker(health())
        guarded = breaker.guard(PointwiseAdapter(judge))
        for number in range(times):
            await judge_together(guarded, ASKED, f"g{number}", ("a", "b"))
        also(breaker)
        breaker.check()

    asyncio.run(asked())


@pytest.mark.parametrize("cause", ["timeout", "refused", "died"])
def test_a_judge_that_is_down_is_asked_until_the_second_pause_would_begin(cause: Cause) -> None:
    judge = Fails(cause, attempts=2)
    with pytest.raises(Unfit, match=f"again after a pause of 0.01 s: 2 {cause}; the last one: why"):
        ask(judge, times=50)
    assert judge.num_asked <= 6
    with pytest.raises(Unfit, match=f"^2 of 2 verdicts failed .* 2 {cause}"):
        ask(Fails(cause, attempts=1), times=1)


@pytest.mark.parametrize(
    ("cause", "attempts"), [("unparseable", 2), ("truncated", 2), ("undecided", 1), ("refused", 0)]
)
def test_what_an_evaluation_measures_is_no_outage(cause: Cause, attempts: int) -> None:
    """A rule that lacks its reference has refused without being asked."""
    ask(judge := Fails(cause, attempts), times=50)
    assert judge.num_asked == 100


def test_verdicts_of_an_earlier_process_count_in_the_share() -> None:
    def add_good_ones(breaker: OutageBreaker) -> None:
        for _ in range(8):
            breaker.count(None)

    ask(Fails("died", attempts=1), times=1, also=add_good_ones)
