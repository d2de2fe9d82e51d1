"""Lines of the doctor about environments other than this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grmpipe.run.doctor import doctor


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("2.29.7", "; NCCL 2.29.7, as the learner's"),
        ("2.30.7", "; NCCL 2.30.7, the learner's is 2.29.7: NCCL refuses to connect them, so weights are sent by gloo"),
        ("", ""),
    ],
)
def test_the_line_of_sglang_says_whether_nccl_connects_it_with_the_learner(
    theirs: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.installed, "nccl_version", lambda python="": theirs if python else "2.29.7")
    monkeypatch.setattr(doctor.installed, "sglang_missing", lambda python: None)
    line = doctor.sglang(sys.executable)
    assert line.startswith(f"in the environment of {sys.executable}{said}")
    assert ("NCCL" in line) == bool(said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "flags\t\t: fpu avx2 avx512_bf16 amx_bf16",
            "units for bfloat16 (amx_bf16, avx512_bf16); dtype=auto is float32",
        ),
        ("Features\t: fp asimd bf16", "units for bfloat16 (bf16); dtype=auto is float32"),
        ("flags\t\t: fpu avx2", "no units for bfloat16, in which they are slow; dtype=auto is float32"),
    ],
)
def test_the_line_of_the_cores_says_whether_they_multiply_in_bfloat16(flags: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    assert doctor.bf16_units(tmp_path / "cpuinfo") == f"{said} on them"


def test_the_doctor_says_whether_processes_that_share_a_gpu_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert doctor.describe_mps() == "no MPS: kernels of processes that share a GPU take turns"
    (tmp_path / "control").touch()
    assert doctor.describe_mps() == "MPS runs: kernels of processes that share a GPU overlap"
