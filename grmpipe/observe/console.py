"""The console during a run: a live panel in a terminal, one line per step elsewhere. Measures nothing."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grmpipe.observe.gauges import (
    ACCURACY,
    ONE_JUDGE,
    PACE,
    REWARD,
    SCORE,
    WAITS,
    Gauge,
    GaugeSet,
    failures_by_cause,
    failures_text,
    held_out_texts,
    judge_texts,
    missing_signal_text,
    step_lines,
)
from grmpipe.observe.guard import Guard
from grmpipe.trackers.tracker import SampleRow, Tracker
from grmpipe.types import Metrics

TREND_STEPS = 40
SCALES = {ACCURACY: (0.0, 1.0), SCORE: (1.0, 10.0), REWARD: (0.0, 1.0)}
SAMPLES_SHOWN = 3
PANEL_COLUMNS = 96  # longer lines are hard to read


class RunConsole(Console):
    """A console whose output may be closed (`| head`, a closed terminal), on which rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with Path(os.devnull).open("wb") as nowhere:  # buffered text must be flushed somewhere
            os.dup2(nowhere.fileno(), self.file.fileno())


class ConsoleSink(Tracker):
    """Text of models is never read as markup, and its control characters never reach the terminal."""

    def __init__(self, num_steps: int, console: Console | None = None, shown: GaugeSet = ONE_JUDGE) -> None:
        self._num_steps = num_steps
        self._shown = shown
        self.console = console or RunConsole(highlight=False)
        self._latest: Metrics = {}
        self._failed: Counter[str] = Counter()  # judgements by cause, since the process began
        self._trends: dict[Gauge, deque[float]] = {
            gauge: deque(maxlen=TREND_STEPS) for gauge in (ACCURACY, shown.score)
        }
        self._live: Live | None = None
        self._guard = Guard()
        self._width = min(PANEL_COLUMNS, self.console.width)

    def log(self, step: int, metrics: Metrics) -> None:
        for gauge, trend in self._trends.items():
            if math.isfinite(metrics.get(gauge.metric, math.nan)):
                trend.append(metrics[gauge.metric])
        if self.console.is_terminal:
            self._latest |= metrics
            self._failed.update(failures_by_cause(metrics))
            self._show(self._panel(step))
        else:
            self._print(*(Text(line) for line in step_lines(step, self._num_steps, metrics, self._shown)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        self._print(Text(readable(text), style="dim"))

    def alarm(self, text: str) -> None:
        self._print(Text(f"ALARM  {readable(text)}", style="bold red"))

    def bottleneck(self, text: str) -> None:
        """Print the bottleneck of the run."""
        self._print(Text(f"bottleneck  {readable(text)}", style="yellow"))

    def missing_signal(self, text: str) -> None:
        """Print how much of the run had no signal to learn from."""
        self._print(Text(f"no signal  {readable(text)}", style="yellow"))

    def requests(self, text: str) -> None:
        """Print the requests to one model that judges."""
        self._print(Text(f"requests  {readable(text)}", style="dim"))

    def print_samples(self, rows: Sequence[SampleRow]) -> None:
        """Print three rollouts with the GRM's critiques, so that no score is shown without its critique."""
        self._print(*(sample_panel(row, self._width) for row in rows[:SAMPLES_SHOWN]))

    def print_files(self, run_dir: Path, files: Mapping[str, str]) -> None:
        """`files`: name -> its content."""
        grid = Table.grid(padding=(0, 2))
        for name, holds in files.items():
            grid.add_row(Text(name, style="bold"), Text(holds, style="dim"))
        self._print(Text(str(run_dir), style="bold cyan"), grid)

    def _print(self, *parts: RenderableType) -> None:
        with self._guard.watch("console"):
            for part in parts:
                # soft_wrap: a log file has no width, and a wrapped path can't be copied.
                self.console.print(part, soft_wrap=isinstance(part, Text))

    def _show(self, panel: Panel) -> None:
        if self._live is None:
            # No refresh thread: only the event loop's own work runs next to the pipeline.
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(panel, refresh=True)

    def _panel(self, step: int) -> Panel:
        progress = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._num_steps, completed=step, width=48)
        progress.add_row(Text(f"step {step}/{self._num_steps}", style="bold"), bar)
        failures = failures_text(self._failed)
        failed = Text("judgements failed  ", style="dim").append(failures, "green" if failures == "none" else "red")
        if signal := missing_signal_text(self._latest):
            failed.append(f"  {signal}", "yellow")
        judges: list[RenderableType] = [Text(), judge_grid(self._latest)] if any(judge_texts(self._latest)) else []
        body = Group(progress, Text(), self._trend_grid(), Text(), self._gauge_grid(), *judges, failed)
        return Panel(body, title="grmpipe", title_align="left", border_style="cyan", width=self._width)

    def _trend_grid(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for gauge, trend in self._trends.items():
            curve = sparkline(trend, *SCALES[gauge])
            value = Text(gauge.text(self._latest), style="bold")
            grid.add_row(Text(gauge.title, style="dim"), value, Text(curve, style="green"))
        held_out = "  ".join(held_out_texts(self._shown, self._latest))
        grid.add_row(Text("held-out", style="dim"), Text(), Text(held_out))
        return grid

    def _gauge_grid(self) -> Table:
        """Pace on the left, stalls on the right."""
        grid = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "left", "left", "right"):
            grid.add_column(justify=justify)
        for pace, wait in zip(PACE, WAITS, strict=True):
            left = (Text(pace.title, style="dim"), Text(pace.text(self._latest).strip()))
            grid.add_row(*left, Text(), Text(wait.title, style="dim"), Text(wait.text(self._latest).strip()))
        return grid


def judge_grid(metrics: Metrics) -> Table:
    """A row for each of several judges, and for each cascade."""
    grid = Table.grid(padding=(0, 2))
    for name, text in judge_texts(metrics):
        grid.add_row(Text(name, style="dim"), Text(text))
    return grid


def sample_panel(row: SampleRow, width: int) -> Panel:
    parts = [("question", row.question, ""), ("answer", row.answer, "cyan")]
    parts += [("critique", row.critique, "yellow")] if row.critique else []  # a rule writes none
    grid = Table.grid(padding=(0, 2))
    for part, text, style in parts:
        grid.add_row(Text(part, style="dim"), Text(readable(text), style=style))
    score = "no score" if row.score is None else f"score {row.score:g}"
    title = Text(f"{row.group_id} · sibling {row.sibling}")
    ended = Text(f"{score} · {truth_text(row)}")
    return Panel(grid, title=title, subtitle=ended, title_align="left", width=width)


def truth_text(row: SampleRow) -> str:
    if row.truth is None:
        return "truth unknown"
    return {1.0: "truly right", 0.0: "truly wrong"}.get(row.truth, f"truth {row.truth:g}")


def readable(text: str) -> str:
    """The text without control characters: models can sample sequences that recolour, clear or retitle a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """One character per value, on the fixed scale [low, high]; values outside are shown at its edge."""
    top = len(BARS) - 1
    return "".join(BARS[max(0, min(top, round((value - low) / (high - low) * top)))] for value in values)
