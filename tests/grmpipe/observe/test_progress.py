"""The line on what a run does: whose text it shows, where it is rewritten, and that it never fails a run."""

from __future__ import annotations

import asyncio
import io
import os

import pytest
from rich.console import Console

from grmpipe.observe import progress
from grmpipe.observe.progress import Progress, left_at_pace, rewrites, time_text


def lines_in_a_file(*stages: object) -> list[str]:
    """What is written of stages that are within each other, from the inner one on as each ends."""
    console = Console(file=io.StringIO(), width=40)
    shown = Progress(console)

    async def run(rest: tuple[object, ...]) -> None:
        if rest:
            with shown.show_while(rest[0]):  # type: ignore[arg-type]
                await run(rest[1:])
        await asyncio.sleep(0.05)

    async def go() -> None:
        async with shown.show():
            await run(stages)

    asyncio.run(go())
    assert isinstance(console.file, io.StringIO)
    return list(dict.fromkeys(console.file.getvalue().splitlines()))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.01)


def test_the_inner_work_is_shown_until_it_ends_and_none_where_none_is_wanted() -> None:
    assert lines_in_a_file("outer", "inner") == ["inner  0 s", "outer  0 s"]
    assert lines_in_a_file("outer", "") == ["outer  0 s"]
    long = "x" * 60
    assert lines_in_a_file(lambda took_s: long) == [long], "a file has no width"


def test_counts_that_cannot_be_read_fail_nothing() -> None:
    assert lines_in_a_file("outer", lambda took_s: str(1 / 0)) == ["outer  0 s"]


def test_only_a_terminal_has_its_line_rewritten_even_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        assert rewrites(Console(file=terminal))
        assert not rewrites(Console(file=io.StringIO(), force_terminal=True))
        monkeypatch.setenv("TERM", "dumb")
        assert not rewrites(Console(file=terminal))
    os.close(reader)


def test_times_are_short_and_unknown_before_anything_is_done() -> None:
    assert [time_text(seconds) for seconds in (0.4, 99.0, 150.0, 7200.0)] == ["0 s", "99 s", "2 min", "2.0 h"]
    assert left_at_pace(0, 8, 3.0) is None
    assert left_at_pace(2, 8, 3.0) == 9.0
