"""Exports of what a filter finds."""

import csv
import io
import json
from pathlib import Path

import pytest
from viewed_run import answer, write_run

from grmpipe.models.types import Message
from grmpipe.observe.recorder import Recorder
from grmpipe.types import Prompt
from grmpipe.viewer.annotations import Annotation
from grmpipe.viewer.export import ROWS_AT_ONCE, export_rollouts, write_cells
from grmpipe.viewer.queries import Filter
from grmpipe.viewer.runs import ViewedRun, find_runs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ViewedRun:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recorder = Recorder(write_run(tmp_path / "run"))
    for sibling in range(2 * ROWS_AT_ONCE):
        text = "=HYPERLINK(1)\n" if sibling == 7 else 'later, "so"'
        prompt = Prompt(prompt_id="p3", messages=(Message(role="user", content="More?"),), source="-more")
        recorder.rollout(2, prompt, answer("g3", sibling, text))
    recorder.close()
    run = find_runs(tmp_path / "run")["run"]
    assert list(run.index.follow())
    return run


ANNOTATIONS = [
    Annotation(id="a", rater="anna", group="g1", sibling=1, right=True, share=0.25),
    Annotation(id="b", rater="ben", group="g1", best=1),
]


def test_json_lines_hold_every_rollout_that_matches_with_texts_and_annotations(run: ViewedRun) -> None:
    lines = [json.loads(line) for line in b"".join(export_rollouts(run, Filter(), "jsonl", ANNOTATIONS)).splitlines()]
    assert len(lines) == 3 + 2 * ROWS_AT_ONCE
    right = next(line for line in lines if (line["group_id"], line["sibling"]) == ("g1", 1))
    assert (right["group_id"], right["sibling"], right["score"], right["truth"]) == ("g1", 1, 3.0, 1.0)
    assert (
        right["response"] == "It is 42" and right["reference"] == "42" and right["critiques"][0]["text"] == "Too short"
    )
    assert right["annotations"] == [
        {"rater": "anna", "says": "right", "share": 0.25}, {"rater": "ben", "says": "best: 1", "share": None},
    ]  # fmt: skip
    (only,) = b"".join(export_rollouts(run, Filter(truth="fooled"), "jsonl", [])).splitlines()
    assert json.loads(only)["response"].startswith("Trust me")


def test_csv_has_a_row_per_rollout_and_no_cell_that_a_spreadsheet_runs(run: ViewedRun) -> None:
    text = b"".join(export_rollouts(run, Filter(), "csv", ANNOTATIONS)).decode()
    rows = [*csv.DictReader(io.StringIO(text, newline=""))]
    assert len(rows) == 3 + 2 * ROWS_AT_ONCE
    by_place = {(row["group_id"], row["sibling"]): row for row in rows}
    assert by_place["g3", "7"]["response"] == "'=HYPERLINK(1)\n" and by_place["g3", "7"]["source"] == "'-more"
    assert by_place["g3", "8"]["response"] == 'later, "so"'
    assert by_place["g1", "1"]["annotations"] == "anna right 0.25\n\nben best: 1"
    assert by_place["g1", "1"]["advantage"] == "-1.0"  # a number


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "  =1"])
def test_a_text_that_begins_like_a_formula_gets_an_apostrophe(cell: str) -> None:
    assert next(csv.reader(io.StringIO(write_cells([cell, -1]).decode(), newline=""))) == [f"'{cell}", "-1"]
