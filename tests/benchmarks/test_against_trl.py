"""The comparison with TRL: its report on both sides' runs. Needs no TRL, measures nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import against_trl  # noqa: E402

OURS = {"policy": 0.1, "grm": 0.2, "learner": 0.3, "sync": 0.01, "learner waits": 0.02}
TRLS = {"generate": 1.0, "reward": 2.0, "forward": 0.25, "backward": 0.5, "other": 0.125}


def run(step_s: float, stages_s: dict[str, float]) -> against_trl.Run:
    looks = {step: 0.3 + step / 200 for step in range(0, against_trl.STEPS + 1, against_trl.LOOK_EVERY)}
    first = [9.0] * against_trl.SETTLED  # a slow start, in no mean
    return against_trl.Run(
        step_s=[*first, *[step_s] * (against_trl.STEPS - len(first))], looks=looks, final=0.75, final_greedy=0.875,
        stages_s=stages_s, busy_share=0.02,
    )  # fmt: skip


def test_seconds_to_an_accuracy_end_at_the_first_evaluation_that_reaches_it() -> None:
    one = run(0.5, OURS)
    assert one.mean_s == 0.5
    assert one.seconds_to(0.4) == pytest.approx(against_trl.SETTLED * 9.0 + 15 * 0.5)  # at step 20
    assert one.seconds_to(0.3) == 0.0
    assert one.seconds_to(0.9) is None


def test_the_stages_of_a_trl_step_add_up_to_its_time() -> None:
    step = {"step": 4.0, "training_step": 3.75, "generate": 1.0, "reward": 2.0, "forward": 0.25}
    told = against_trl.stages_of_trl([step])
    assert told == {"generate": 1.0, "reward": 2.0, "forward": 0.25, "backward": 0.5, "other": 0.25}
    assert sum(told.values()) == step["step"]


def test_sides_take_turns_and_a_finished_part_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    settings = {"1 thread": 2.0, "2 threads": 1.0}

    def trl(folder: Path, python: str, seed: int, setting: str) -> against_trl.Run:
        asked.append(f"trl-{seed} with {setting}")
        return run(2.0, TRLS)

    def ours(folder: Path, seed: int) -> against_trl.Run:
        asked.append(f"grmpipe-{seed}")
        return run(0.5, OURS)

    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "trl-1.json").write_text(json.dumps(asdict(run(4.0, TRLS))))
    (tmp_path / "stages.json").write_text(
        json.dumps({"step": 0.7, "rollouts": 0.1, "judgements": 0.2, "micro-batches and step": 0.3, "weight sync": 0.1})
    )
    monkeypatch.setattr(against_trl, "run_trl", trl)
    monkeypatch.setattr(against_trl, "run_ours", ours)
    monkeypatch.setattr(against_trl, "REPORT", tmp_path / "against_trl.md")
    monkeypatch.setattr(sys, "argv", ["against_trl.py", str(tmp_path), "--trl", "python", "--only", "grmpipe-0"])
    against_trl.main()
    assert asked == ["grmpipe-0"] and not against_trl.REPORT.exists()
    monkeypatch.setattr(sys, "argv", sys.argv[:-2])
    against_trl.main()
    assert asked == ["grmpipe-0", "trl-0 with 2 threads", "grmpipe-1"]
    text = against_trl.REPORT.read_text(encoding="utf-8")
    assert "takes 4.0 and 8.0 times as long as ours" in text
    assert "| one step (mean), s | 0.500 | 0.500 | 2.000 | 4.000 |" in text
    assert "| forward, backward, optimizer | 0.875 | 0.300 | 0.300 |" in text
    (tmp_path / "stages.json").unlink()
    assert "| forward, backward, optimizer | 0.875 | 0.300 |" in against_trl.report(tmp_path)
    assert "| 80 | 0.700 | 0.700 | 0.700 | 0.700 |" in text
    assert str(tmp_path) not in text


def test_the_section_of_smollm2_stands_beside_that_of_the_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def real(step_s: float, cpu_s: float) -> str:
        right = {f"{when} {how}": 0.25 for when in ("first", "last") for how in ("sampled", "greedy")}
        first = [99.0] * against_trl.SMOLLM2_SETTLED  # in no median
        values = {"step_s": [*first, step_s, step_s], "cpu_s": [*first, cpu_s, cpu_s], "peak_gb": 4.0, "right": right}
        return json.dumps(values | {"busy_share": 0.0})

    (tmp_path / "settings.json").write_text(json.dumps({"1 thread": 30.0, "2 threads": 20.0}))
    (tmp_path / "grmpipe-0.json").write_text(real(8.0, 10.0))
    (tmp_path / "trl-0.json").write_text(real(20.0, 40.0))
    page = tmp_path / "against_trl.md"
    page.write_text("# Comparison with TRL\n\nThe tiny models.\n")
    monkeypatch.setattr(against_trl, "REPORT", page)
    command = ["against_trl.py", str(tmp_path), "--trl", "python", "--model", "smollm2", "--weights", str(tmp_path)]
    monkeypatch.setattr(against_trl, "find_files", lambda path, weights: path)
    monkeypatch.setattr(sys, "argv", [*command, "--only"])
    for _ in range(2):
        against_trl.main()
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Comparison with TRL\n\nThe tiny models.\n\n## SmolLM2-135M\n")
    assert text.count("makes 2.5 times TRL's steps per second** (median of 1: 2.5)") == 1
    assert "TRL takes 4.0 times its CPU seconds" in text and "| right, greedy | 0.25 -> 0.25 | 0.25 -> 0.25 |" in text
