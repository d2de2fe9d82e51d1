"""The kit for the first half hour on a GPU, rehearsed on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.scheduler.devices import DEVICES

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import first_gpu  # noqa: E402


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> first_gpu.Kit:
    monkeypatch.setattr(first_gpu, "FOLDER", tmp_path)
    monkeypatch.setattr(first_gpu, "REHEARSED_PAGE", tmp_path / "gpu.md")
    return first_gpu.Kit(rehearse=True)


def test_a_piece_replaces_its_own_rows_and_keeps_those_of_others(kit: first_gpu.Kit, tmp_path: Path) -> None:
    def rows() -> list[list[str]]:
        lines = (tmp_path / "gpu.md").read_text(encoding="utf-8").splitlines()
        return [line.split(" | ")[1:4] for line in lines if line.startswith("| CPU, rehearsed")]

    first_gpu.write_rows(kit, "gap", [["old", "1", "", ""], ["older", "2", "", ""]])
    first_gpu.write_rows(kit, "learner", [["speed", "3", "", ""]])
    first_gpu.write_rows(kit, "gap", [["new", "4", "", ""]])
    assert rows() == [["learner", "speed", "3"], ["gap", "new", "4"]]
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    kit.card = "NVIDIA H200"
    first_gpu.write_rows(kit, "gap", [["there", "5", "", ""]])
    assert set(text.splitlines()) < set((tmp_path / "gpu.md").read_text(encoding="utf-8").splitlines())


def test_attention_and_the_gap_are_measured_beside_what_is_exact(kit: first_gpu.Kit) -> None:
    (attention,) = first_gpu.measure_attention(kit)
    mean, largest = first_gpu.measure_gap(kit)
    assert 0 < attention.measured < 1e-4
    assert mean.measured <= largest.measured < 1e-4


def test_a_plan_is_calibrated_to_the_device_whose_speeds_were_measured(
    kit: first_gpu.Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, _ = kit.plan(kit.compose("0.6B"))
    slower = first_gpu.scale_device(DEVICES["cpu"], bandwidth=0.5, arithmetic=0.7)
    costs = first_gpu.estimate_costs(replace(facts, devices=dict.fromkeys(facts.devices, slower)))
    packed = 2 * len(first_gpu.draw_batch(facts.config.train.micro_batch_tokens, facts).token_ids_T)
    learned = first_gpu.predict_learner(costs, packed)
    first_gpu.write_rows(kit, "learner", [["learner of 0.6B", f"{learned:,.1f} packed tokens/s", "1", "1"]])
    engines = [
        [first_gpu.name_engine(count), f"{first_gpu.predict_engine(costs, count, 16):,.1f} tokens/s", "1", "1"]
        for count in kit.in_flight
    ]
    assert list(first_gpu.calibrate_plan(kit)) == [], "an engine was not measured"
    first_gpu.write_rows(kit, "engine", engines)
    bandwidth, arithmetic = first_gpu.calibrate_plan(kit)
    assert bandwidth.measured == pytest.approx(slower.memory_gb_per_s, rel=0.05)
    assert arithmetic.measured == pytest.approx(slower.tflops["float32"], rel=0.05)
    (typed,) = re.findall(r"'(\+plan\.devices=.*)' placement", capsys.readouterr().out)
    assert kit.compose("0.6B", typed).plan.devices["measured"].memory_gb_per_s == pytest.approx(
        bandwidth.measured, rel=1e-3
    )


def test_forms_for_several_cards_are_seated_and_skipped_where_there_are_none(
    kit: first_gpu.Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(first_gpu.run_on_cards(kit)) == []
    said = capsys.readouterr().out
    assert all(
        f"cards: {name}: skipped, it needs {cards} cards" in said for name, (cards, _) in first_gpu.ON_CARDS.items()
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_pieces_run_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/first_gpu.py", "--rehearse"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for piece in first_gpu.PIECES:
        assert f"{piece}: done" in done.stdout
    assert "learner of 1.7B" in first_gpu.REHEARSED_PAGE.read_text(encoding="utf-8")
