"""What benchmarks/simulator.py counts, compares and reports. Measures nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # a benchmark imports its neighbours like a script

import simulator


def made(run_dir: Path, times: list[float], status: str = "completed") -> Path:
    run_dir.mkdir(parents=True)
    lines = [{"step": 0, "eval/score": 1.0}, *({"step": n + 1, "time/step_s": time} for n, time in enumerate(times))]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "summary.json").write_text(json.dumps({"status": status}))
    return run_dir


def test_the_steps_in_which_the_pipeline_fills_and_drains_are_not_counted(tmp_path: Path) -> None:
    assert simulator.measured_s(made(tmp_path / "run", [9.0] * 4 + [1.0, 2.0, 3.0] + [8.0] * 2)) == pytest.approx(2.0)


def test_only_completed_runs_of_a_placement_count(tmp_path: Path) -> None:
    first, second = (made(tmp_path / f"laptop_synchronous-{turn}", [1.0]) for turn in range(2))
    made(tmp_path / "laptop_synchronous-2", [1.0], status="interrupted")
    made(tmp_path / "laptop-0", [1.0])
    assert simulator.runs_of(tmp_path, "laptop, synchronous") == {0: first, 1: second}


def test_what_others_took_before_a_run_is_told_and_nobody_looked_is_nothing(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "run", [1.0])
    assert simulator.others_share(run_dir) == 0.0
    (run_dir / simulator.OTHERS).write_text('{"busy_share": 0.25}')
    assert simulator.others_share(run_dir) == 0.25


def row(name: str, measured: list[float], foretold: list[float], others: float = 0.0) -> simulator.Row:
    by_round = {"laptop": dict(enumerate(foretold))} if foretold else {}
    return simulator.Row(name=name, measured=dict(enumerate(measured)), foretold=by_round, others=others)


def test_errors_are_counted_and_so_is_the_order_of_placements_that_can_be_distinct_overrides() -> None:
    rows = [row("a", [1.0, 1.2], [1.1, 1.3]), row("b", [1.1, 1.3], [1.8, 1.9]), row("c", [2.0, 2.2], [0.9, 1.0])]
    text = simulator.verdicts(rows, ["laptop"])
    assert "1 of 3 within 15%" in text
    assert "of the 2 pairs" in text, "a and b overlap"
    assert "0 are predicted in their order" in text


def test_the_table_has_a_cell_for_each_profile_and_none_for_a_placements_own() -> None:
    rows = [row("a", [1.0, 2.0, 3.0], [1.1, 2.0, 2.7]), row("laptop", [2.0], [])]
    _, _, first, second = simulator.table(rows, ["laptop"]).splitlines()
    assert "2.000, +0% (-10% to +10%)" in first
    assert "(itself)" in second


def test_a_run_is_compared_with_the_profile_of_its_own_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(run: Path, profile: Path) -> SimpleNamespace:
        return SimpleNamespace(step_s=f"{run.name} by {profile.name}")

    monkeypatch.setattr(simulator, "foretold", told)
    runs, profiles = {0: tmp_path / "a-0", 2: tmp_path / "a-2"}, {1: tmp_path / "b-1", 2: tmp_path / "b-2"}
    assert simulator.foretold_by(runs, profiles) == {2: "a-2 by b-2"}


def test_the_report_says_how_it_was_measured_and_how_noisy_the_machine_is() -> None:
    rows = [row("a", [1.0, 1.0], [1.2]), row("b", [2.0, 1.0, 1.5], [1.0], others=0.25)]
    text = simulator.report(rows, ["laptop"], "python benchmarks/simulator.py runs/x")
    assert text.startswith("# Accuracy of the simulator")
    assert "`python benchmarks/simulator.py runs/x`: 2 placements" in text
    assert "differ by 33% in the median, by 67% at most (b)" in text
    assert "| b | 1.500 | 1.000, 2.000 | 25% |" in text
