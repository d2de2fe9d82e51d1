"""What is typed for a library that is missing."""

from __future__ import annotations

import importlib.metadata

import pytest

from models.engines.installed import peft_missing


def test_without_peft_its_extra_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peft_missing() is None

    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr("models.engines.installed.version", missing)
    assert peft_missing() == 'peft is not installed; type `pip install "grmpipe[lora]"`'
