"""Engines of a pipeline that die: no sample is altered or doubled."""

from __future__ import annotations

import asyncio

import pytest
from pipeline_bench import Bench, flow, long_tailed

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.types import Engine, EngineDied
from grmpipe.pipeline.interfaces import (
    StepReport,
)
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.scheduler.run_together import run_until
from grmpipe.scheduler.slots.engine_replacement import HealthConfig, RoleHealth


def sampled(bench: Bench) -> dict[tuple[str, int], tuple[int, ...]]:
    """Every rollout's tokens; asserts that none is there twice."""
    found = {(r.group_id, r.sibling): r.turns[0].completion.token_ids for r in bench.journal.rollouts}
    assert len(found) == len(bench.journal.rollouts), "doubled"
    return found


def test_a_dead_engine_is_survived_and_no_sample_is_altered_or_doubled() -> None:
    quiet, struck = (Bench(flow(num_steps=8), lengths=long_tailed, num_engines=2) for _ in range(2))

    async def strike(report: StepReport) -> None:
        struck.reports.append(report)
        if report.step == 3:
            struck.engines[0].die("killed by signal 9")

    struck.after_step = strike  # type: ignore[method-assign]
    quiet.run()
    ledger = struck.run().ledger
    assert (ledger.trained, ledger.dropped) == (32, {})
    assert set(struck.policy.members.alive) == {"policy-1"}
    assert sampled(struck) == sampled(quiet)


def test_the_only_engine_is_replaced_and_no_sample_is_altered_or_doubled() -> None:
    quiet, struck = (Bench(flow(num_steps=8), lengths=long_tailed) for _ in range(2))

    async def strike(report: StepReport) -> None:
        struck.reports.append(report)
        if report.step in (3, 5):
            struck.policy.members.alive["policy-0"].die("killed by signal 9")  # type: ignore[attr-defined]

    async def restart(name: str) -> Engine:
        await asyncio.sleep(2.0)
        return struck.make_engine(struck.pipeline.version)

    async def run() -> Pipeline:
        struck.pipeline = struck.build()
        health = RoleHealth("policy", struck.policy, restart, HealthConfig())
        await run_until(struck.pipeline.run(), health=health.run())
        assert health.num_replaced == 2
        return struck.pipeline

    struck.after_step = strike  # type: ignore[method-assign]
    quiet.run()
    ledger = run_virtually(run).ledger
    assert (ledger.trained, ledger.dropped) == (32, {})
    assert sampled(struck) == sampled(quiet)


def test_run_without_engines_ends_with_the_cause() -> None:
    bench = Bench(flow())

    async def strike(report: StepReport) -> None:
        bench.engines[0].die("killed by signal 9")

    bench.after_step = strike  # type: ignore[method-assign]
    with pytest.raises(EngineDied, match="killed by signal 9"):
        bench.run()
