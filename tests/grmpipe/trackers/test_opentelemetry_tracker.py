"""OpenTelemetry's own SDK, with an exporter in memory: a trace a step, its spans at their times, and what a run was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from grmpipe.config.tracking import TrackingConfig
from grmpipe.observe.all_trackers import AllTrackers
from grmpipe.observe.timeline import Timeline
from grmpipe.trackers.opentelemetry_tracker import OpenTelemetryTracker
from grmpipe.trackers.tracker import TrackedRun


def test_spans_of_the_timeline_are_children_of_their_step_at_their_time(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    tracker = OpenTelemetryTracker(TrackedRun(run_dir=tmp_path / "run_3", config={}, state={}), exporter)
    trackers = AllTrackers({"opentelemetry": tracker})
    timeline = Timeline(tmp_path / "timeline.json", others=trackers)
    now_s, wall_s = time.monotonic(), time.time()
    timeline.span("policy-0", "rollout", now_s - 2.0, now_s - 0.5, num_tokens=18)
    trackers.log(1, {"train/reward": 0.5, **{f"x/{index}": 0.0 for index in range(200)}})
    timeline.span("learner", "update", now_s - 1.0, now_s)
    trackers.alarm("the judge is fooled")
    trackers.log(2, {"train/reward": 0.75})
    trackers.end("failed", "out of memory")
    timeline.close()
    trackers.close()
    assert not trackers.failures
    spans = {span.name: span for span in exporter.get_finished_spans()}
    rollout, first, update, second, last = (
        spans[name] for name in ("rollout", "step 1", "update", "step 2", "end of the run")
    )
    assert (rollout.parent.span_id, rollout.context.trace_id) == (first.context.span_id, first.context.trace_id)
    assert update.parent.span_id == second.context.span_id
    assert rollout.attributes == {"grmpipe.lane": "policy-0", "grmpipe.num_tokens": 18}
    assert rollout.start_time / 1e9 == pytest.approx(wall_s - 2.0, abs=0.5)
    assert rollout.end_time - rollout.start_time == 1_500_000_000
    assert len({span.context.trace_id for span in (first, second, last)}) == 3
    assert first.attributes["train/reward"] == 0.5 and first.attributes["x/199"] == 0.0
    assert [event.attributes["text"] for event in second.events] == ["the judge is fooled"]
    assert (last.status.status_code, last.status.description) == (StatusCode.ERROR, "out of memory")
    assert first.resource.attributes["service.name"] == "grmpipe"


def test_without_the_exporter_or_a_collector_a_run_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracking = TrackingConfig(trackers=["opentelemetry"])
    assert tracking.find_missing().endswith(
        "set OTEL_EXPORTER_OTLP_ENDPOINT to your collector, for example http://localhost:4318"
    )
    monkeypatch.setattr("grmpipe.trackers.opentelemetry_tracker.EXPORTER", "opentelemetry.exporter.unknown")
    assert tracking.find_missing().endswith("type `pip install 'grmpipe[opentelemetry]'`")
