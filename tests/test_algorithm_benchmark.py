"""The benchmark of algorithms: its rows are real, its report says what was run. Measures nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import launch  # noqa: F401  registers the schema
from grmpipe.config import build
from grmpipe.train.settings import CORRECTIONS, ESTIMATORS, LOSSES, REJECTIONS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import algorithms  # noqa: E402

ROWS = [row for table in algorithms.TABLES.values() for row in table]


def result(row: str, seed: int, after: float) -> algorithms.Result:
    return algorithms.Result(
        row=row, seed=seed, before=0.25, after=after, after_greedy=0.5, grm_score=7.0, step_s=1.0 + seed, learner_s=0.5,
        steps=40, dropped={"no_signal": 3} if seed else {}, load=2.0,
    )  # fmt: skip


def test_every_row_composes_and_all_names_are_among_them() -> None:
    """All but process rewards, which the quickstart's judge gives none of, and those of a critic."""
    used: dict[str, set[str]] = {"estimator": set(), "loss": set(), "correction": set(), "rejections": set()}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for row in ROWS:
            algorithm = build(compose("config", ["+experiment=quickstart", *row.overrides])).algorithm
            for key, names in used.items():
                value = getattr(algorithm, key)
                names |= {value} if isinstance(value, str) else set(value)
    assert used["estimator"] == set(ESTIMATORS) - {"process", "process_grpo", "gae", "gae_raw"}
    assert (used["loss"], used["correction"]) == (set(LOSSES), set(CORRECTIONS))
    assert used["rejections"] == set(REJECTIONS)


def test_no_two_rows_have_a_name_in_common() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_report_tells_each_seed_and_what_was_not_run() -> None:
    lines = algorithms.report([result("grpo", 1, 0.75), result("grpo", 0, 0.5)], ["## TRL", ""])
    assert "| grpo | 0.250, 0.250 | 0.500, 0.750 | 0.500, 0.500 | 7.00 | 1.50 | 0.50 |" in lines
    assert "| rloo | not run | | | | | |" in lines
    assert any("grpo (seed 1): {'no_signal': 3}" in line for line in lines)
    assert lines[-1] == "## TRL"


def test_a_row_that_was_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def run(row: algorithms.Row, seed: int, folder: Path) -> algorithms.Result:
        asked.append((row.name, seed))
        return result(row.name, seed, 0.5)

    monkeypatch.setattr(algorithms, "run", run)
    algorithms.run_missing(tmp_path, ["grpo"], [0])
    algorithms.run_missing(tmp_path, ["grpo", "rloo"], [0, 1])
    assert asked == [("grpo", 0), ("rloo", 0), ("grpo", 1), ("rloo", 1)]
    assert len(algorithms.results_in(tmp_path)) == 4
    with pytest.raises(SystemExit, match="no such rows: sarsa"):
        algorithms.run_missing(tmp_path, ["sarsa"], [0])
