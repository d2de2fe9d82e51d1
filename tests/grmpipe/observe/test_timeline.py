"""The timeline: valid whenever it is opened, no false nesting, bounded memory."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grmpipe.observe.timeline import ROWS_PER_LANE, SPILL_EVENTS, Lanes, Timeline


def events_of(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def test_spans_are_complete_events_in_microseconds_on_named_threads(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.span("policy-0", "rollout", 1.5, 1.75, tokens=18, group="g0")
    timeline.close()
    (span,) = events_of(tmp_path / "timeline.json")
    assert (span["name"], span["ts"], span["dur"]) == ("rollout", 1.5e6, 0.25e6)
    assert span["args"] == {"tokens": 18, "group": "g0"}
    names = {e["tid"]: e["args"]["name"] for e in events_of(tmp_path / "timeline.json", "M") if "thread_name" in str(e)}
    assert names[span["tid"]] == "policy-0"


def test_overlapping_spans_get_rows_next_to_their_lane(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for start_s in (0.0, 0.1, 0.2, 1.0):
        timeline.span("policy-0", "rollout", start_s, start_s + 0.5)
    timeline.span("learner", "step", 0.0, 2.0)
    timeline.close()
    titles = [e["args"]["name"] for e in events_of(tmp_path / "timeline.json", "M") if e["name"] == "thread_name"]
    assert titles == ["policy-0", "policy-0 · 2", "policy-0 · 3", "learner"]
    first, _, _, fourth, learner = events_of(tmp_path / "timeline.json")
    assert first["tid"] == fourth["tid"] < learner["tid"]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=60), st.booleans())
def test_spans_of_a_row_never_overlap(spans: list[tuple[float, float]], by_end: bool) -> None:
    lanes, rows = Lanes(), defaultdict(list)
    for start_s, length_s in sorted(spans, key=sum) if by_end else spans:
        row = lanes.place("lane", start_s, start_s + length_s)
        assert row is not None
        rows[row.tid].append((start_s, start_s + length_s))
    for placed in rows.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(placed))


def test_a_lane_out_of_rows_leaves_spans_out_and_says_how_many(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for _ in range(ROWS_PER_LANE + 6):
        timeline.span("policy-0", "rollout", 0.0, 1.0)
    timeline.close()
    assert len(events_of(tmp_path / "timeline.json")) == ROWS_PER_LANE
    assert "6 spans left out" in (tmp_path / "timeline.json").read_text()


def test_a_run_that_was_killed_leaves_whole_events_and_only_the_bracket_out(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.span("learner", "step", 0.0, 1.0)
    timeline.flush()
    text = (tmp_path / "timeline.json").read_text()
    assert text.startswith("[\n")
    assert text.endswith("},\n")
    assert json.loads(text[:-2] + "]")[-1]["name"] == "step"


def test_resumed_run_appends_to_its_timeline_after_a_close_and_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    closed = Timeline(path)
    closed.span("learner", "closed", 0.0, 1.0)
    closed.close()
    killed = Timeline(path)
    killed.span("learner", "killed", 2.0, 3.0)
    killed.flush()
    path.write_bytes(path.read_bytes() + b'{"ph": "X", "args": {}, "na')
    last = Timeline(path)
    last.span("learner", "last", 4.0, 5.0)
    last.close()
    assert [span["name"] for span in events_of(path)] == ["closed", "killed", "last"]


def test_memory_is_bounded_by_spilling(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for i in range(5 * SPILL_EVENTS):
        timeline.span("learner", "accumulate", i * 1e-3, (i + 1) * 1e-3)
        assert len(timeline._pending) <= SPILL_EVENTS
    assert (tmp_path / "timeline.json").read_text().count('"X"') >= 4 * SPILL_EVENTS


def test_value_that_json_lacks_breaks_no_timeline(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.span("learner", "step", 0.0, 1.0, norm=float("nan"), path=tmp_path)  # type: ignore[arg-type]
    timeline.close()
    assert events_of(tmp_path / "timeline.json")[0]["args"] == {"norm": None, "path": str(tmp_path)}


def test_a_full_disk_fails_no_step_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").symlink_to("/dev/full")
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.span("learner", "step", 0.0, 1.0)
    timeline.close()
    assert timeline.failures["timeline.json"] >= 2
