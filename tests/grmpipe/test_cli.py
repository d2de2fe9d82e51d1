"""The command's errors: words of others in them are text, in any terminal."""

from __future__ import annotations

import pytest

from grmpipe.cli import complain


def test_an_error_that_repeats_control_characters_is_printed_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert complain("judge.model: the endpoint said \x1b[2J\x1b]0;owned\x07\nSee run.log", 2) == 2
    assert capsys.readouterr().err == "grmpipe: judge.model: the endpoint said �[2J�]0;owned�\nSee run.log\n"
