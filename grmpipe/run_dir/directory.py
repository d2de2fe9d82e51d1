"""The place of a run's files, and whether there is a run to resume. Only `point_latest` writes."""

import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.io.resume_rules import NEW_RUN, ConfigChange, changes_on_resume, find_changed_keys
from grmpipe.config.io.yaml_io import explain_old_key, find_missing_keys, read_yaml
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.run_dir.checkpoints import Checkpoints

HOME = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLocation:
    """A run's directory. resumed: it holds the run already. checkpoint: where to continue; None: from the beginning.
    changes: keys that this resume changes. complete: there is nothing left to do.

    notes: what is damaged in it, and what is done about that.
    """

    run_dir: Path
    resumed: bool = False
    checkpoint: Path | None = None
    changes: tuple[ConfigChange, ...] = ()
    complete: bool = False
    notes: tuple[str, ...] = ()


def locate_run(config: RunConfig) -> RunLocation:
    """The location of a run. A new run never writes into another run's files; a resumed one never changes what is
    trained.
    """
    named = config.run_dir
    if (run_dir := run_to_resume(config)) is not None:
        return locate_resumed(run_dir, config)
    if config.resume == "never" and named is not None and holds_run(Path(named)):
        raise refusal(Path(named), config.task)
    home = HOME / config.experiment_name
    kind = "replay" if config.data.is_replay else f"run with task={config.task}"
    notes = (f"resume: {named or home} holds no {kind}; a new one starts",) * (config.resume == "auto")
    return RunLocation(run_dir=new_run_dir(home) if named is None else Path(named), notes=notes)


def run_to_resume(config: RunConfig) -> Path | None:
    """The directory of the run that resume=auto continues; None if there is none. Without a run_dir it is the
    experiment's newest run of this task: the one that `latest` names, else the last by date.
    """
    if config.resume != "auto":
        return None
    if config.run_dir is not None:
        return Path(config.run_dir) if holds_run(Path(config.run_dir)) else None
    home = HOME / config.experiment_name
    latest = home / (home / "latest").resolve().name  # the name that the run used for itself
    by_date = sorted((path.parent for path in home.glob("*/config.yaml") if not path.parent.is_symlink()), reverse=True)
    for run_dir in (path for path in (latest, *by_date) if holds_run(path)):
        try:
            other = read_yaml(run_dir / "config.yaml")
        except ConfigError:  # it counts, so that the resume reports it
            return run_dir
        if other.task == config.task and other.data.is_replay == config.data.is_replay:
            return run_dir
    return None


def is_complete(run_dir: Path, config: RunConfig) -> bool:
    """Whether a run did all its steps. It is incomplete again when more steps are wanted."""
    # A run that is judged again may have more rollouts by now, and a service goes on.
    if read_status(run_dir)[0] != "completed" or config.task in ("rejudge", "serve"):
        return False
    return config.task != "train" or config.train.num_steps <= read_yaml(run_dir / "config.yaml").train.num_steps


def refusal(run_dir: Path, task: str = "train") -> ConfigError:
    if task == "rejudge":
        return ConfigError(
            f"rejudge.name: {run_dir} already holds verdicts; type resume=auto to continue them, or another "
            "rejudge.name"
        )
    return ConfigError(f"run_dir: {run_dir} already holds a run; type resume=auto to continue it, or another run_dir")


def holds_run(run_dir: Path) -> bool:
    return (run_dir / "config.yaml").exists()


def new_run_dir(home: Path) -> Path:
    """A name that is free now; the process that makes the directory finds out whether it still is."""
    wanted = home / datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    return next(path for path in new_run_dirs(wanted) if not path.exists())


def new_run_dirs(wanted: Path) -> Iterator[Path]:
    """Names to try, the preferred one first."""
    return (wanted if n == 0 else wanted.with_name(f"{wanted.name}_{n}") for n in range(1000))


def locate_resumed(run_dir: Path, config: RunConfig) -> RunLocation:
    """The run at its newest whole checkpoint; without one it starts over."""
    written = run_dir / "config.yaml"
    if moved := explain_old_key(written):
        raise ConfigError(f"resume: {written} is from another version of grmpipe: {moved}; {NEW_RUN}")
    if lacking := find_missing_keys(written):
        raise ConfigError(
            f"resume: {written} is incomplete, or from another version of grmpipe: it lacks {', '.join(lacking[:3])}"
            f"{' and more' if lacking[3:] else ''}; restore a complete one, or {NEW_RUN}"
        )
    old = read_yaml(written)
    changed = find_changed_keys(old, config)
    if changed and config.task == "rejudge":
        raise ConfigError(
            f"rejudge.name: {run_dir} holds the verdicts of another judge, or on other rollouts: {'; '.join(changed)}; "
            "undo it, or type another rejudge.name"
        )
    if changed:
        raise ConfigError(
            f"resume: the configuration differs from that of {run_dir}: {'; '.join(changed)}; undo it, or {NEW_RUN}"
            + (f" (policy.path={policy} goes on from its policy)" if (policy := run_dir / "policy").is_dir() else "")
        )
    if is_complete(run_dir, config):
        return RunLocation(run_dir=run_dir, resumed=True, complete=True)
    notes = read_status(run_dir)[1]
    checkpoint, checkpoint_notes = find_checkpoint(run_dir)
    changes = changes_on_resume(old, config)
    return RunLocation(
        run_dir=run_dir, resumed=True, checkpoint=checkpoint, changes=changes, notes=notes + checkpoint_notes
    )


def find_checkpoint(run_dir: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The newest whole checkpoint, and the damaged ones skipped for it. Raises ConfigError if all are damaged."""
    found = Checkpoints(directory=run_dir / "checkpoints", keep=1).find()
    if not found.damaged:
        return found.checkpoint, ()
    damaged = "; ".join(found.damaged)
    if found.checkpoint is None:
        raise ConfigError(
            f"resume: no checkpoint in {run_dir}/checkpoints is complete ({damaged}); restore a copy, or {NEW_RUN}"
        )
    return found.checkpoint, (f"damaged in {run_dir}/checkpoints: {damaged}; continuing from {found.checkpoint.name}",)


def read_status(run_dir: Path) -> tuple[str | None, tuple[str, ...]]:
    """How the run ended (None if it runs or was killed), and what is wrong with the file that says so."""
    summary = run_dir / "summary.json"
    if not summary.exists():
        return None, ()
    try:
        return str(json.loads(summary.read_text(encoding="utf-8"))["status"]), ()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, (f"{summary} can't be read; the run finishes again from its last checkpoint",)


def point_latest(run_dir: Path, config: RunConfig) -> None:
    """Point runs/<experiment_name>/latest to this run. A run in another directory has no such link; evaluations and
    replays leave it at the run whose model they use.
    """
    home = HOME / config.experiment_name
    if run_dir.resolve().parent != home.resolve() or not config.trains or config.data.is_replay:
        return
    draft = home / f".latest-{os.getpid()}"
    draft.symlink_to(run_dir.name)
    draft.replace(home / "latest")
