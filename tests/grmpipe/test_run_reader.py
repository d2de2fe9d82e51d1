"""A run's files from Python: rows, and lines that can't be read."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from journal_mutations import collect_records, mutate_line, write_all_journals
from viewed_run import answer, by_judges, report, write_run

from grmpipe.observe.recorder import Recorder
from grmpipe.run_reader import RunReader, read_run

TABLES = {
    "metrics.jsonl": ("metrics", "evaluations"),
    "groups.jsonl": ("groups",),
    "rollouts.jsonl": ("rollouts", "episodes"),
    "judgements.jsonl": ("judgements",),
    "trained.jsonl": ("trained",),
    "eval_rollouts.jsonl": ("eval_rollouts",),
    "eval_judgements.jsonl": ("eval_judgements",),
    "judged.jsonl": ("judged_items",),
}


def test_rows_are_short_and_those_of_judgements_have_their_reward(tmp_path: Path) -> None:
    run = read_run(write_all_journals(tmp_path))
    first, *_, last = run.judgements
    assert (first.reward, last.reward) == (0.8, 0.2)
    assert repr(first) == "<JudgedSibling g1/0: reward 0.8>"
    failed = next(row for row in run.judgements if row.group_id == "g2")
    assert (failed.reward, repr(failed)) == (None, "<JudgedSibling g2/0: failed: timeout>")
    assert [(row.reward, repr(row)) for row in run.eval_judgements] == [(0.5, "<EvalJudgement e1/0: reward 0.5>")]
    assert repr(next(iter(run.rollouts))) == "<RecordedRollout g1/0: finished, 1 turns, 10 tokens>"
    for names in TABLES.values():
        for name in names:
            assert all(len(repr(row)) < 700 for row in getattr(run, name)), name


@pytest.mark.parametrize("num_lines", [25, pytest.param(1500, marks=pytest.mark.long)])
def test_a_line_is_rows_or_left_out_or_an_error_that_names_it(tmp_path: Path, num_lines: int) -> None:
    records, rng = collect_records(tmp_path), random.Random(3)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    num_errors = 0
    for journal, tables in TABLES.items():
        for _ in range(num_lines):
            line = mutate_line(rng.choice(records[journal]), rng)
            (run_dir / journal).write_bytes(line)
            for table in tables:
                try:
                    getattr(RunReader(run_dir), table).to_arrow()
                except ValueError as error:
                    num_errors += 1
                    assert f"{run_dir / journal}:1: " in str(error) or "a value of the row" in str(error), line
        (run_dir / journal).unlink()
    assert num_errors > num_lines


def test_a_line_of_metrics_without_numbers_is_left_out_and_logged_by_file_and_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = write_run(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train/reward": "high"}\n{"train/reward": 0.5}\n{"step": 3, "train/reward": null}\n')
    with caplog.at_level(logging.WARNING):
        steps = [row["step"] for row in read_run(run_dir).metrics]
    assert steps == [1, 3]
    assert "metrics.jsonl:2: " in caplog.text and "metrics.jsonl:3: it has no step" in caplog.text


def test_a_number_that_its_column_cannot_hold_names_the_row(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    recorder = Recorder(run_dir)
    recorder.record_verdict(answer("g9", 2**40, ""), by_judges(strict=report(2.0)))
    recorder.close()
    with pytest.raises(ValueError, match=r"a value of the row \{'group_id': 'g9', 'sibling': 1099511627776\} doesn't"):
        read_run(run_dir).judgements.to_arrow()


def test_a_summary_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / "summary.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"run/summary\.json can't be read"):
        _ = read_run(run_dir).summary
