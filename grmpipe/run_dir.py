"""Where a run's files go, and whether there is a run to go on with. Looks and names; `point_latest` alone writes."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grmpipe.checkpoints import Checkpoints
from grmpipe.config import ConfigError, RunConfig
from grmpipe.config_files import read_yaml, torn_off
from grmpipe.resumption import changed_keys

HOME = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run's directory. resumed: it holds the run already. checkpoint: what to go on from; none: from the beginning.
    complete: there is nothing left to do. notes: what is damaged in there, and what is done about it.
    """

    run_dir: Path
    resumed: bool = False
    checkpoint: Path | None = None
    complete: bool = False
    notes: tuple[str, ...] = ()


def find_place(config: RunConfig) -> Place:
    """A new run never writes into an old one's files; a resumed one never changes what is trained."""
    named, home = config.run_dir, HOME / config.experiment
    if config.resume == "auto":
        run_dir = Path(named) if named else home / (home / "latest").resolve().name  # as the run itself called it
        if holds_run(run_dir):
            return resumed(run_dir, config)
    if named is None:
        return Place(run_dir=new_run_dir(home))
    if config.resume == "never" and holds_run(Path(named)):
        raise refusal(Path(named))
    return Place(run_dir=Path(named))


def refusal(run_dir: Path) -> ConfigError:
    return ConfigError(f"run_dir: {run_dir} holds a run already; type resume=auto to go on with it, or another run_dir")


def holds_run(run_dir: Path) -> bool:
    return (run_dir / "config.yaml").exists()


def new_run_dir(home: Path) -> Path:
    """A name that is free now; whoever makes the directory finds out whether it still is."""
    wanted = home / datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    return next(path for path in new_run_dirs(wanted) if not path.exists())


def new_run_dirs(wanted: Path) -> Iterator[Path]:
    """Names to try, the best one first."""
    return (wanted if n == 0 else wanted.with_name(f"{wanted.name}_{n}") for n in range(1000))


def resumed(run_dir: Path, config: RunConfig) -> Place:
    """The run at its newest whole checkpoint; one that has none yet starts over."""
    written = run_dir / "config.yaml"
    if lacking := torn_off(written):
        raise ConfigError(
            f"resume: {written} is torn, or of another version of grmpipe: it lacks {', '.join(lacking[:3])}"
            f"{' and more' if lacking[3:] else ''}; put a whole one there, or start a new run with resume=never"
        )
    if changed := changed_keys(read_yaml(written), config):
        raise ConfigError(
            f"resume: the configuration differs from that of {run_dir}: {'; '.join(changed)}; "
            "undo it, or start a new run with resume=never"
        )
    status, notes = status_of(run_dir)
    if status == "completed":
        return Place(run_dir=run_dir, resumed=True, complete=True)
    checkpoint, told = checkpoint_of(run_dir)
    return Place(run_dir=run_dir, resumed=True, checkpoint=checkpoint, notes=notes + told)


def checkpoint_of(run_dir: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The newest whole one, and what was passed over for it. Raises ConfigError where all are damaged."""
    found = Checkpoints(directory=run_dir / "checkpoints", keep=1).find()
    if not found.damaged:
        return found.checkpoint, ()
    damaged = "; ".join(found.damaged)
    if found.checkpoint is None:
        raise ConfigError(
            f"resume: no checkpoint in {run_dir}/checkpoints is whole ({damaged}); put a copy there, or start a new "
            "run with resume=never and another run_dir"
        )
    return found.checkpoint, (f"damaged in {run_dir}/checkpoints: {damaged}; going on from {found.checkpoint.name}",)


def status_of(run_dir: Path) -> tuple[str | None, tuple[str, ...]]:
    """How the run ended, None for one that runs or was killed; and what is wrong with the file that says it."""
    summary = run_dir / "summary.json"
    if not summary.exists():
        return None, ()
    try:
        return str(json.loads(summary.read_text(encoding="utf-8"))["status"]), ()
    except (ValueError, TypeError, KeyError):
        return None, (f"{summary} can't be read; the run ends anew from its last checkpoint",)


def point_latest(run_dir: Path, config: RunConfig) -> None:
    """runs/<experiment>/latest -> this run; a run elsewhere has no such link."""
    home = HOME / config.experiment
    if run_dir.resolve().parent != home.resolve():
        return
    draft = home / f".latest-{os.getpid()}"
    draft.symlink_to(run_dir.name)
    draft.replace(home / "latest")
