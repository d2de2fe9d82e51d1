"""What a run shows within its steps: on a terminal, and in a file."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grmpipe.observe import progress

TINY = (
    "tracking.console=true", "train.groups_per_batch=2", "train.group_size=2", "data.num_eval_prompts=4",
    "judge_monitor.anchors=4",
)  # fmt: skip


@contextlib.contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """Context: stdout is a terminal. Gives a function: what it got so far."""
    reader, writer = os.openpty()
    got: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # its other end is closed
            while data := os.read(reader, 1 << 16):
                got.append(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    with os.fdopen(writer, "w") as stdout, contextlib.redirect_stdout(stdout):
        yield lambda: b"".join(got).decode()
    thread.join(10)
    os.close(reader)


def test_on_a_terminal_one_line_moves_within_steps_and_evaluations_and_is_gone_at_the_end(
    small_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(progress, "TERMINAL_EVERY_S", 0.02)
    with terminal() as shown:
        assert small_run("train.num_steps=2", *TINY).summary["status"] == "completed"
    parts = re.split(r"\r\x1b\[2K|\r\n\r\x1b\[1A\x1b\[2K", re.sub(r"\x1b\[[\d;]*m", "", shown()))
    kept = [line for part in parts for line in part.split("\r\n")[:-1]]
    drawn = [part.split("\r\n")[-1] for part in parts]  # and erased
    for line in (
        r"starting: processes  0 s", r"starting: the judge's first verdicts  \d+ s",
        r"evaluation held-out-0  answers \d/8  verdicts \d/4.*", r"step 1/2  rollouts \d/4  verdicts \d/4.*",
        r"step 2/2  rollouts \d/4  verdicts \d/4.*", r"after step 2.*",
    ):  # fmt: skip
        assert any(re.fullmatch(line, one) for one in drawn), (line, drawn)
    verdicts = [int(one[1]) for line in drawn if (one := re.match(r"step 1/2 .* verdicts (\d)/4", line))]
    assert verdicts == sorted(verdicts), "it counts up"
    assert len(set(verdicts)) > 1, "it moves"
    assert not [line for line in kept if "verdicts" in line], "what moves is erased"
    assert any(line.startswith("step 2/2  took") for line in kept)
    assert drawn[-1] == ""
    assert "\x1b[?25l" not in shown(), "the cursor is left alone: a process may be ended at once"


def test_in_a_file_progress_is_whole_lines_in_an_interval_without_control_characters(
    small_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as many CI systems set it
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.005)
    with contextlib.redirect_stdout(io.StringIO()) as file:
        small_run("train.num_steps=1", "judge=rule", *TINY)
    written = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())  # forced colours
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", written)
    lines = written.splitlines()
    assert any(re.fullmatch(r"evaluation held-out-0  answers \d/8  verdicts \d/4.*", line) for line in lines), lines
    assert any(re.fullmatch(r"step 1/1  rollouts \d/4  verdicts \d/4.*", line) for line in lines), lines
