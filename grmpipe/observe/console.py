"""The console during a run: a line per step, notes, and at the end samples and files."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grmpipe.models.terminal_text import replace_controls
from grmpipe.observe.console_metrics import ONE_JUDGE, GaugeSet, step_lines
from grmpipe.observe.guard import Guard
from grmpipe.trackers.tracker import SampleRow, Tracker
from grmpipe.types import Metrics

SAMPLES_SHOWN = 3
PANEL_COLUMNS = 96  # longer lines are hard to read


class RunConsole(Console):
    """A console whose output may be closed (`| head`, a closed terminal), on which rich would end the process."""

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor as it is: a process that is ended at once would leave its terminal without one."""
        return False

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
        self._guard = Guard()
        self._width = min(PANEL_COLUMNS, self.console.width)

    def log(self, step: int, metrics: Metrics) -> None:
        self._print(*(Text(line) for line in step_lines(step, self._num_steps, metrics, self._shown)))

    def note(self, text: str) -> None:
        self._print(Text(replace_controls(text), style="dim"))

    def alarm(self, text: str) -> None:
        self._print(Text(f"ALARM  {replace_controls(text)}", style="bold red"))

    def remark(self, about: str, text: str, style: str = "yellow") -> None:
        """Print a line on the whole run: its bottleneck, the requests to a model that judges."""
        self._print(Text(f"{about}  {replace_controls(text)}", style=style))

    def print_samples(self, rows: Sequence[SampleRow]) -> None:
        """Print three rollouts with the GRM's critiques, so that no score is shown without its critique."""
        self._print(*(sample_panel(row, self._width, self._shown.sample) for row in rows[:SAMPLES_SHOWN]))

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


def sample_panel(row: SampleRow, width: int, number: str) -> Panel:
    parts = [("question", row.question, ""), ("answer", row.answer, "cyan")]
    parts += [("critique", row.critique, "yellow")] if row.critique else []  # a rule writes none
    grid = Table.grid(padding=(0, 2))
    for part, text, style in parts:
        grid.add_row(Text(part, style="dim"), Text(replace_controls(text), style=style))
    score = f"no {number}" if row.score is None else f"{number} {row.score:g}"
    title = Text(f"{row.group_id} · sibling {row.sibling}")
    ended = Text(f"{score} · {truth_text(row)}")
    return Panel(grid, title=title, subtitle=ended, title_align="left", width=width)


def truth_text(row: SampleRow) -> str:
    if row.truth is None:
        return "truth unknown"
    return {1.0: "truly right", 0.0: "truly wrong"}.get(row.truth, f"truth {row.truth:g}")
