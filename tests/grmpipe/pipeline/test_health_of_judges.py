"""An unfit judge pauses judging and the deadlines, and failures are counted by judge."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from grmpipe.pipeline.health import JudgeHealth, ServiceHealth, Unfit
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import (
    Failed,
    JudgeReport,
    Verdict,
)

LOST = Failed(stage="judge", cause="timeout", attempts=1)


def health_of_judge(window: int, pause_s: float) -> ServiceHealth:
    return ServiceHealth(
        "judging",
        max_failure_rate=0.5,
        window=window,
        pause_s=pause_s,
        counted="verdicts",
        key="judge.max_failure_rate",
    )


def test_an_unfit_judge_pauses_and_the_deadlines_with_it() -> None:
    async def go() -> None:
        health = JudgeHealth(health_of_judge(window=4, pause_s=0.05))
        clock = ActiveClock()
        before = clock.now()
        for _ in range(2):
            health.verdict(JudgeReport(verdict=LOST))
        paused = asyncio.get_running_loop().time()
        await health.until_fit(clock)
        assert asyncio.get_running_loop().time() - paused >= 0.04
        assert clock.now() - before < 0.04
        with pytest.raises(Unfit, match="timeout"):
            for _ in range(4):
                health.verdict(JudgeReport(verdict=LOST))

    asyncio.run(go())


def test_a_failed_composition_is_blamed_on_the_judges_that_failed() -> None:
    good = JudgeReport(verdict=Verdict(rewards=(), score=5, breakdown={}, score_std=0, num_judgements=1))
    failed = JudgeReport(verdict=LOST, by_judge={"judge": good, "second": JudgeReport(verdict=LOST)})
    jury = dataclasses.replace(good, by_judge={"judge": JudgeReport(verdict=LOST), "second": good})

    async def go() -> str:
        service = health_of_judge(window=8, pause_s=30.0)
        health = JudgeHealth(service)
        for report in (jury, failed, failed):
            health.verdict(report)
        return service.cause

    assert "2 of the last 3 verdicts failed" in (cause := asyncio.run(go()))
    assert "; judges that failed: second in 2" in cause, "a jury without a member has a verdict"
