"""Lines of a log can be read in a terminal, whatever a server or a tool wrote into them."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from grmpipe.observe.logs import OURS, replace_handlers, setup_logging


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in OURS]
    before, level = list(root.handlers), root.level
    console = Console(file=io.StringIO(), width=200)
    for handler in before:
        root.removeHandler(handler)
    setup_logging(tmp_path, console)
    yield console
    for logger in (root, *loggers):
        replace_handlers(logger)
    for handler in before:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)


def test_control_characters_reach_neither_run_log_nor_the_console(console: Console, tmp_path: Path) -> None:
    try:
        raise ValueError("the server said \x1b]0;owned\x07")
    except ValueError:
        logging.getLogger("grmpipe.judge").exception("no verdict: \x1b[2J\u202e")
    assert isinstance(console.file, io.StringIO)
    log, shown = (tmp_path / "run.log").read_text(encoding="utf-8"), console.file.getvalue()
    assert "no verdict: �[2J�\nTraceback" in log and "the server said �]0;owned�" in log
    assert "no verdict: �[2J�" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(log + shown)
