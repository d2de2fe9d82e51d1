"""Guarantee 3: no batch of the pipeline holds a group older than `max_staleness`, and versions are known by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
from pipeline_bench import Bench, flow, long_tailed


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_batch_keeps_the_staleness_bound_and_nothing_is_lost(max_staleness: int) -> None:
    bench = Bench(flow(max_staleness=max_staleness, num_steps=20, rollout_concurrency=8), lengths=long_tailed)
    pipeline = bench.run()
    ledger = pipeline.ledger
    assert (ledger.trained, ledger.submitted, ledger.in_flight) == (80, 80, 0)
    for version, groups in enumerate(bench.trainer.steps):
        assert len(groups) == 4
        assert all(0 <= version - group.version <= max_staleness for group in groups)
    assert pipeline.max_staleness_trained <= max_staleness


def test_synchronous_training_uses_only_tokens_of_the_current_version() -> None:
    bench = Bench(flow(max_staleness=0), lengths=long_tailed)
    bench.run()
    for version, groups in enumerate(bench.trainer.steps):
        assert {s.version for g in groups for r in g.rollouts for s in r.turns[0].completion.versions} == {version}


def test_a_rollout_that_spans_a_sync_knows_both_versions() -> None:
    bench = Bench(flow(max_staleness=2), lengths=long_tailed)
    bench.run()
    spans = [r.turns[0].completion.versions for r in bench.journal.rollouts]
    assert any(len(stretch) > 1 for stretch in spans)
    assert all(a.end == b.start and a.version < b.version for s in spans for a, b in pairwise(s))


def test_when_groups_of_a_deterministic_run_open_depends_on_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    paced: list[float] = []
    monkeypatch.setattr(
        "grmpipe.scheduler.admission.AdmissionPace.step_ended", lambda pace, now_s, step_s: paced.append(step_s)
    )
    Bench(flow(deterministic=True, num_steps=3)).run()
    assert paced == []
    Bench(flow(num_steps=3)).run()
    assert len(paced) == 3
