"""What a run does at the moment: a line rewritten in place on a terminal, a line a minute elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from grmpipe.observe.guard import Guard

TERMINAL_EVERY_S = 0.25
LOG_EVERY_S = 60.0

Describe = Callable[[float], str]  # seconds since the work began -> the line; empty: none is shown


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a run does from `began_s` on."""

    describe: Describe
    began_s: float


class Progress:
    """Shows the latest work that isn't over. A timer of the event loop reads the counts that others keep."""

    def __init__(self, console: Console | None = None) -> None:
        """console: the one that shows the steps; without one nothing is shown."""
        self._console = console
        self._works: list[Work] = []
        self._line: Live | None = None
        self._in_place = False  # it is shown on a terminal now
        self._guard = Guard()

    @contextmanager
    def show_while(self, what: str | Describe) -> Iterator[None]:
        """Context: the run does this. A plain text is shown with the time that it takes; an empty one isn't."""
        describe = (lambda took_s: what and f"{what}  {time_text(took_s)}") if isinstance(what, str) else what
        work = Work(describe, time.monotonic())
        self._works.append(work)
        self._changed()
        try:
            yield
        finally:
            self._works.remove(work)
            self._changed()

    @asynccontextmanager
    async def show(self) -> AsyncIterator[None]:
        """Context: show it. At the end the line is gone."""
        if (console := self._console) is None:
            yield
            return
        self._in_place = rewrites(console)
        timer = asyncio.create_task(self._repeat(console))
        try:
            yield
        finally:
            timer.cancel()
            self._in_place = False
            self._hide()

    async def _repeat(self, console: Console) -> None:
        while True:
            await asyncio.sleep(TERMINAL_EVERY_S if self._in_place else LOG_EVERY_S)
            self._show(console)

    def _show(self, console: Console) -> None:
        with self._guard.watch("progress"):
            if not (text := self._text()):
                self._hide()
            elif self._in_place:
                self._draw(console, text)
            else:
                console.print(Text(text, style="dim"), soft_wrap=True)

    def _text(self) -> str:
        if not self._works:
            return ""
        work = self._works[-1]
        return work.describe(time.monotonic() - work.began_s)

    def _changed(self) -> None:
        """Show other work on a terminal at once: it may block the event loop, or print without the line."""
        if self._console is not None and self._in_place:
            self._show(self._console)

    def _draw(self, console: Console, text: str) -> None:
        line = Text(text, style="dim", no_wrap=True, overflow="ellipsis")
        if self._line is None:
            self._line = Live(line, console=console, auto_refresh=False, transient=True)
            self._line.start(refresh=True)
        else:
            self._line.update(line, refresh=True)

    def _hide(self) -> None:
        if self._line is not None:
            line, self._line = self._line, None
            line.stop()


def rewrites(console: Console) -> bool:
    """Whether a line can be rewritten in place there: not in a file, a pipe or a notebook, even where colours are
    forced.
    """
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


def counts_text(name: str, done: int, total: int) -> str:
    """`rollouts 12/32`, as wide for each number up to the total."""
    return f"{name} {done:>{len(str(total))}}/{total}"


def speed_text(name: str, tokens: int, seconds: float) -> str:
    """Tokens per second; empty while there are none."""
    return f"{name} {tokens / seconds:,.0f} tok/s" if tokens > 0 and seconds >= 1.0 else ""


def left_text(left_s: float | None, what: str = "") -> str:
    """The time left, an estimate; empty if it isn't known or over."""
    return f"{what}~{time_text(left_s)} left" if left_s is not None and left_s >= 0.5 else ""


def left_at_pace(done: int, total: int, took_s: float) -> float | None:
    """Seconds left if the rest takes as long as what is done. None if nothing is."""
    return took_s * (total - done) / done if done else None


def time_text(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def join_shown(*parts: str) -> str:
    return "  ".join(part for part in parts if part)
