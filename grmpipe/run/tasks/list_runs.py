"""task=runs: a line per run below a folder: how it stands, its figures, and the keys in which it differs. task=view:
pages of them on this machine. task=report: the report of one, also of a crashed or running one. None starts an engine.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grmpipe.config.io.yaml_io import read_yaml
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.terminal_text import replace_controls
from grmpipe.observe.console import REPORT
from grmpipe.observe.report import write_report
from grmpipe.observe.run_files import RunFiles, read_run
from grmpipe.pipeline.stall_times import StallTimes, bottleneck
from grmpipe.run.errors import RunFailed
from grmpipe.run.tasks.stats import read_setup
from grmpipe.run_dir.directory import HOME, holds_run
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


INSTALL = "task: view needs aiohttp; type: pip install 'grmpipe[viewer]'"


def view_runs(config: RunConfig) -> None:
    """Serve until Ctrl-C. Raises ConfigError if there is no run."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(INSTALL)
    from grmpipe.viewer.server import view

    view(Path(config.run_dir) if config.run_dir else HOME, settings=config.annotate, seed=config.seed)


def make_report(config: RunConfig) -> str:
    """Return the path of the report. Raises ConfigError if there is no run, RunFailed if it can't be written."""
    run_dir = Path(config.run_dir) if config.run_dir else HOME / config.experiment_name / "latest"
    if not holds_run(run_dir):
        raise ConfigError(f"run_dir: {run_dir} holds no run; type run_dir=runs/<experiment_name>/latest")
    if not write_report(run_dir, bottleneck_so_far(run_dir)):
        raise RunFailed(f"{run_dir / REPORT} could not be written; the cause is reported above")
    return str(run_dir / REPORT)


def bottleneck_so_far(run_dir: Path) -> str | None:
    """The bottleneck of a run without a summary."""
    if (run_dir / "summary.json").exists():
        return None
    try:
        config = read_yaml(run_dir / "config.yaml")
    except ConfigError:  # of another version: unknown keys
        return None
    return bottleneck(total_stalls(read_run(run_dir)), read_setup(config))


def total_stalls(run: RunFiles) -> StallTimes:
    return StallTimes(
        rollouts_s=run.total("stall/rollouts_s"),
        envs_s=run.total("stall/envs_s"),
        verdicts_s=run.total("stall/verdicts_s"),
        training_s=run.total("stall/training_s"),
        weight_sync_s=run.total("stall/weight_sync_s"),
        steps_s=run.total("time/step_s"),
    )
