"""The line on a step: its counts, speeds without what ended before it, and the time left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grmpipe.pipeline.counters import FlowCounters
from grmpipe.pipeline.why_waiting import BatchProgress
from grmpipe.run.tasks import training_steps
from grmpipe.run.tasks.training_steps import StepProgress


def test_a_step_shows_its_own_tokens_and_the_time_left_by_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(training_steps.time, "monotonic", lambda: now_s)
    batch = BatchProgress(rollouts=12, verdicts=8, siblings=32, learner="judge")
    pipeline = SimpleNamespace(version=6, counters=FlowCounters(), batch_progress=batch)
    pipeline.counters.step.policy_tokens = 900  # of an evaluation's time, between two steps
    line = StepProgress(pipeline, 80)  # type: ignore[arg-type]
    assert line.describe(0.0) == "step  7/80  rollouts 12/32  verdicts  8/32  the learner waits for verdicts"
    now_s += 4.0
    pipeline.counters.step.policy_tokens += 4800
    assert "  policy 1,200 tok/s  ~12 s left  the learner" in line.describe(0.0), "by the share of its verdicts"
    pipeline.version = 7
    line.next_step(20.0)
    now_s += 5.0
    assert "  ~15 s left  run ~24 min left  the learner" in line.describe(0.0), "the mean, and 72 steps after this one"
