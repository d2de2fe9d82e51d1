"""Guarantee 2: every group of a pipeline ends by its deadline, which stands still in pauses; chaos keeps 1 to 3."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from pipeline_bench import Bench, Judge, LearningJudge, flow

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.types import Engine
from grmpipe.pipeline.interfaces import (
    StepReport,
)
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.scheduler.run_together import run_until
from grmpipe.scheduler.slots.engine_replacement import HealthConfig, RoleHealth
from grmpipe.scheduler.weights.weight_sync import SyncReport
from grmpipe.types import (
    Failed,
    JudgeReport,
    JudgeTask,
    Prompt,
    Rollout,
)


def test_a_group_ends_at_its_deadline_when_a_rollout_never_comes_back() -> None:
    bench = Bench(flow(), lengths=lambda context: 10**6 if context.request_id == "g000002/1/t0" else 10)
    ledger = bench.run().ledger
    assert ledger.dropped == {"rollout_timeout": 1}
    assert bench.journal.ends["g000002"] == "rollout_timeout"


def test_missing_verdicts_at_the_deadline_are_timeouts_and_the_rest_is_trained() -> None:
    def delay(rollout: Rollout) -> float:
        return 1e6 if (rollout.group_id, rollout.sibling) == ("g000000", 2) else 0.1

    bench = Bench(flow(), judge=Judge(delay=delay))
    bench.run()
    (group,) = [g for groups in bench.trainer.steps for g in groups if g.group_id == "g000000"]
    assert isinstance(group.verdicts[2], Failed)
    assert group.verdicts[2].cause == "timeout"


def test_deadline_pauses_during_a_push() -> None:
    bench = Bench(flow(group_deadline_s=1.0, num_steps=3), sync_s=30.0, lengths=lambda context: 80)
    assert bench.run().ledger.dropped == {}


@pytest.mark.parametrize("stopped", [True, False])
def test_deadline_pauses_while_the_only_engine_is_replaced(stopped: bool) -> None:
    """The deadline passes only if no clock stands still."""
    struck = Bench(flow(num_steps=6, max_staleness=0, group_deadline_s=3.0))

    async def strike(report: StepReport) -> None:
        if report.step == 3:
            asyncio.get_running_loop().call_later(0.1, struck.engines[0].die, "killed by signal 9")

    async def restart(name: str) -> Engine:
        await asyncio.sleep(30.0)
        return struck.make_engine(struck.pipeline.version)

    async def run() -> Pipeline:
        struck.pipeline = struck.build()
        health = RoleHealth("policy", struck.policy, restart, HealthConfig())
        if stopped:
            health.clocks.add(struck.pipeline.clock)
        await run_until(struck.pipeline.run(), health=health.run())
        return struck.pipeline

    struck.after_step = strike  # type: ignore[method-assign]
    dropped = run_virtually(run).ledger.dropped
    assert (dropped == {}) is stopped


@pytest.mark.parametrize("seed", range(6))
def test_chaos_of_lost_late_doubled_and_failed_answers_keeps_guarantees_1_to_3(seed: int) -> None:
    """Judge answers are dropped, delayed, doubled and failed at random; rollouts hang at random."""
    rng = random.Random(seed)
    lost = Failed(stage="judge", cause="died", attempts=1)
    bench = Bench(
        flow(num_steps=15, max_staleness=seed % 3, group_deadline_s=4.0),
        judge=Judge(
            mishap=lambda rollout: lost if rng.random() < 0.15 else None,
            delay=lambda rollout: 1e9 if rng.random() < 0.05 else rng.random() * 3,
        ),
        lengths=lambda context: 10**7 if rng.random() < 0.02 else 5 + int(rng.random() * 100),
    )
    judge_once = bench.judge.judge
    doubled = 0

    async def judge_sometimes_twice(prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        nonlocal doubled
        group = bench.pipeline._buffer.groups.get(rollout.group_id)
        if group is not None and group.session is not None and rng.random() < 0.1:
            doubled += 1
            await bench.pipeline._producer.judging.put((group, group.session, JudgeTask(members=(rollout.sibling,))))
        return await judge_once(prompt, rollout, priority)

    bench.judge.judge = judge_sometimes_twice  # type: ignore[method-assign]
    pipeline = bench.run()
    assert doubled > 10
    assert pipeline.ledger
    assert pipeline.version == 15
    for version, groups in enumerate(bench.trainer.steps):
        assert all(version - group.version <= seed % 3 for group in groups)
        for group in groups:
            scores = {r.sibling: v.score for r, v in zip(group.rollouts, group.verdicts, strict=True) if v is not lost
                      and not isinstance(v, Failed)}  # fmt: skip
            assert len(scores) >= 2
            assert all(score == pytest.approx(sibling) for sibling, score in scores.items())
    assert max(bench.journal.verdicts.values()) == 1
    ends = Counter(bench.journal.ends.values())
    assert ends["trained"] == 60
    assert sum(ends.values()) == pipeline.ledger.submitted - pipeline.ledger.in_flight


def test_a_judge_that_changes_costs_no_group_its_deadline() -> None:
    judge = LearningJudge(delay=lambda rollout: 0.3)
    bench = Bench(flow(num_steps=4, group_deadline_s=3.0), judge=judge)

    async def slow_change() -> SyncReport:
        await asyncio.sleep(30.0)
        judge.version = 1
        return SyncReport(version=1, seconds=30.0, pause_seconds=0.0, num_bytes=0, probe_error=0.0)

    async def change_once() -> None:
        await asyncio.sleep(0.5)
        await bench.pipeline.change_judge(1, slow_change)
        await asyncio.sleep(1e9)

    async def go() -> None:
        bench.pipeline = bench.build()
        await run_until(bench.pipeline.run(), change=change_once())

    run_virtually(go)
    assert bench.pipeline.ledger.dropped == {}
