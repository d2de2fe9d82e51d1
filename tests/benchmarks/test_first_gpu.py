"""The kit for the first half hour on a GPU, rehearsed on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
