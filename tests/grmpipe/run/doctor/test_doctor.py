"""Lines of the doctor about environments other than this one."""

from __future__ import annotations

import sys

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
