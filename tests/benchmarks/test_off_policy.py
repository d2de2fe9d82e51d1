"""The benchmark of off-policy corrections: its rows are real, its report matches the runs' files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import off_policy  # noqa: E402


def test_rows_differ_in_the_correction_alone() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        configs = {row.name: build(compose("config", [*off_policy.COMMON, *row.overrides])) for row in off_policy.ROWS}
    found = {name: config.algorithm.correction for name, config in configs.items()}
    assert found == {
        "naive": "grmpipe.algorithm.corrections.apply_no_correction",
        "tis": "tis",
        "icepop": "icepop",
        "decoupled": "decoupled",
    }
    for config in configs.values():
        assert (config.engine.embedded.quantize, config.train.max_staleness) == ("int4", off_policy.STALENESS)
        assert replace(config, algorithm=configs["naive"].algorithm) == configs["naive"]


def test_the_report_tells_what_the_files_hold(tmp_path: Path) -> None:
    for seed, after in ((0, 0.25), (2, 0.75)):
        run_dir = off_policy.run_dir_of(off_policy.ROWS[0], seed, tmp_path)
        run_dir.mkdir()
        looks = {"initial": {"true_accuracy": 0.5}, "final": {"true_accuracy": after, "true_accuracy_greedy": 1.0}}
        (run_dir / "summary.json").write_text(json.dumps({"eval": looks}))
        steps = [
            {
                "step": step, "time/step_s": 1.0, "train/true_accuracy": 0.1 * step, "mismatch/mean_nats": 0.25,
                "mismatch/out_of_band_share": 0.5, "sync/probe_error_nats": float(step),
            }
            for step in (1, 2)
        ]  # fmt: skip
        lines = [{"step": 0, "eval/true_accuracy": 0.5}, *steps]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = [line for line in off_policy.report(tmp_path).splitlines() if line.startswith("| naive")]
    assert row == "| naive | 0.500 | 0.250, 0.750 | 0.500 | 1.000 | 0.150 | 0.250 | 50.0% | 2 |"
    assert off_policy.smoothed([0.0, 1.0, 2.0]) == pytest.approx([0.0, 0.5, 1.0])
