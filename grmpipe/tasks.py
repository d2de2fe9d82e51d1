"""The tasks of launch.py: train, evaluate, plan, doctor. Each prepares, runs to its end and says how it ended."""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from grmpipe import assemble
from grmpipe.config import ConfigError, RunConfig, changed_keys, read_yaml, to_yaml
from grmpipe.doctor import doctor
from grmpipe.failures import RunFailed, RunInterrupted
from grmpipe.plan import plan
from grmpipe.run import train
from grmpipe.run_state import Checkpoints

TASKS_WITHOUT_RUN = {"plan": plan}


def run_task(config: RunConfig) -> float | None:
    """The objective, for a sweeper. Raises ConfigError, RunFailed or RunInterrupted."""
    # Before transformers is imported: a missing directory must not cost 45 s of retries against a hub.
    if config.task == "doctor":
        print(doctor())
        return None
    with model_progress() as progress:
        prepared = assemble.prepare(config, progress)
    if config.task == "plan":
        print(plan(prepared))
        return None
    return run_train(prepared)


def run_train(prepared: assemble.Prepared) -> float | None:
    config = prepared.config
    run_dir, resumed = find_run_dir(config)
    if resumed is None:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    point_latest(run_dir)
    summary = asyncio.run(train(prepared, run_dir, resumed))
    if summary.status == "failed":
        raise RunFailed(f"{summary.failure}\nSee {run_dir}/run.log")
    if summary.status == "interrupted":
        raise RunInterrupted(f"interrupted at step {summary.steps}; go on with resume=auto run_dir={run_dir}")
    return summary.objective


def find_run_dir(config: RunConfig) -> tuple[Path, Path | None]:
    """Where the run's files go, and the checkpoint to go on from.

    A new run never writes into an old one's files; a resumed one never changes what is trained.
    """
    home = Path("runs") / config.experiment
    if config.resume == "auto":
        run_dir = Path(config.run_dir) if config.run_dir else home / "latest"
        if (run_dir / "config.yaml").exists():
            return run_dir.resolve(), checkpoint_of(run_dir.resolve(), config)
        return (Path(config.run_dir) if config.run_dir else new_run_dir(home)), None
    if config.run_dir is None:
        return new_run_dir(home), None
    run_dir = Path(config.run_dir)
    if (run_dir / "config.yaml").exists():
        raise ConfigError(
            f"run_dir: {run_dir} holds a run already; type resume=auto to go on with it, or another run_dir"
        )
    return run_dir, None


def new_run_dir(home: Path) -> Path:
    name = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    candidates = (home / (name if n == 0 else f"{name}_{n}") for n in range(1000))
    return next(path for path in candidates if not path.exists())


def checkpoint_of(run_dir: Path, config: RunConfig) -> Path | None:
    """The last whole checkpoint; None for a run that has none yet: it starts over."""
    changed = changed_keys(read_yaml(run_dir / "config.yaml"), config)
    if changed:
        raise ConfigError(
            f"resume: the configuration differs from that of {run_dir}: {'; '.join(changed)}; "
            "undo it, or start a new run with resume=never"
        )
    checkpoint = Checkpoints(directory=run_dir / "checkpoints", keep=1).latest()
    if checkpoint is not None and (run_dir / "summary.json").exists():
        state = Checkpoints(directory=run_dir / "checkpoints", keep=1).load(checkpoint)
        if state.cut.version >= config.train.num_steps:
            raise AlreadyDone(f"{run_dir} is complete: {state.cut.version} steps; see {run_dir}/summary.json")
    return checkpoint


class AlreadyDone(ConfigError):
    """There is nothing to resume."""


def point_latest(run_dir: Path) -> None:
    """runs/<experiment>/latest -> this run; a run elsewhere has no such link."""
    link = run_dir.parent / "latest"
    draft = run_dir.parent / f".latest-{os.getpid()}"
    draft.symlink_to(run_dir.name)
    draft.replace(link)


@contextmanager
def model_progress() -> Iterator[assemble.Progress]:
    """A bar for each model that has to be made; nothing where all are at hand."""
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True) as bars:
        tasks = {}

        def advance(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=1.0)
            bars.update(tasks[what], completed=share)

        yield advance
