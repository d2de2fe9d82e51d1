"""task=runs: a line per run below a folder: how it stands, its figures, and the keys in which it differs."""

from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grmpipe.config.run_config import RunConfig
from grmpipe.models.terminal_text import replace_controls
from grmpipe.run_dir.directory import HOME
from grmpipe.viewer.runs import ViewedState, find_runs, tell_apart

NUMBERS = {"steps", "reward", "true"}
FAILURE_CHARS = 80  # of why a run failed
WIDTH_IN_FILES = 240  # columns, where the output is no terminal: `grmpipe task=runs | grep completed`


def list_runs(config: RunConfig, console: Console | None = None) -> None:
    """Print the table. Raises ConfigError if there is no run."""
    runs = find_runs(Path(config.run_dir) if config.run_dir else HOME)
    states = sorted(((name, run.state()) for name, run in runs.items()), key=lambda one: one[1].changed)
    if console is None:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=WIDTH_IN_FILES)
    console.print(make_table(states, tell_apart(runs)))


def make_table(states: list[tuple[str, ViewedState]], varied: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("run", "status", "steps", "reward", "true", "changed", "figures", "differs in"):
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    for name, state in states:
        # Figures of held-out prompts, or those of a task that only evaluates.
        cells = [
            name, state.status, str(state.steps or ""), show(state.reward), show(state.true_accuracy),
            f"{state.changed:%m-%d %H:%M}", state.figures or (state.failure or "").partition("\n")[0][:FAILURE_CHARS],
            varied.get(name, ""),
        ]  # fmt: skip
        table.add_row(*(Text(replace_controls(cell)) for cell in cells))
    return table


def show(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"
