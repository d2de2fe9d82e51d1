"""Errors of the Python entry show no secret."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

import grmpipe
from grmpipe.config.keys import secrets
from grmpipe.config.run_config import ConfigError

SECRET, OTHER = "sk-planted-0123456789", "sk-typed-0123456789"
NAMED = "odd-value-0123456789"  # of a variable whose name tells nothing


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restored_logging: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("LAB_ENDPOINT", NAMED)
    monkeypatch.setattr(secrets, "VARIABLES", set())  # of this test only


@pytest.mark.parametrize(
    "overrides",
    [
        [f"judge.nonsense={SECRET}"],
        ["seed=${oc.env:OPENAI_API_KEY}"],
        ["engine.openai.api_key_env=LAB_ENDPOINT", "seed=${oc.env:LAB_ENDPOINT}"],
        ["engine.openai.api_key_env=LAB_ENDPOINT", f"seed={NAMED}"],
        [f"seed='https://joe:{OTHER}@host/v1'"],
        [f"train.lr='https://host/v1?api_key={OTHER}'"],
        [f"judge.template=https://joe:{OTHER}@host/v1"],
        ["engine.openai.api_key_env=LAB_ENDPOINT", f"judge.template={NAMED}"],
    ],
)
def test_error_of_the_python_entry_and_its_causes_show_no_secret(planted: None, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        grmpipe.launch(grmpipe.compose("quickstart", ["cluster=inprocess", "tracking=none", *overrides]))
    shown = "".join(traceback.format_exception(caught.value))
    assert "redacted" in shown
    assert not [secret for secret in (SECRET, OTHER, NAMED) if secret in shown], shown
