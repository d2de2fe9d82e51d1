"""The command's own output, in any terminal."""

from __future__ import annotations

import io
import sys

import pytest
from rich.panel import Panel

from grmpipe.cli import complain, escape_what_stdout_lacks
from grmpipe.observe.console import RunConsole
from grmpipe.run.tasks.sweep import SweepRun, sweep_table


def test_an_error_that_repeats_control_characters_is_printed_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert complain("judge.model: the endpoint said \x1b[2J\x1b]0;owned\x07\nSee run.log", 2) == 2
    assert capsys.readouterr().err == "grmpipe: judge.model: the endpoint said �[2J�]0;owned�\nSee run.log\n"


def test_an_ascii_console_gets_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    escape_what_stdout_lacks()
    print(sweep_table([SweepRun(number=0, overrides=["experiment_name=für"], error="größer")]))
    RunConsole().print(Panel("Größe", title="a · b"))
    shown = written.getvalue().decode("ascii")
    assert "f\\xfcr" in shown and "Gr\\xf6\\xdfe" in shown and "a \\xb7 b" in shown
