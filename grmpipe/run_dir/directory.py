"""The place of a run's files, whether there is a run to resume, and the lock by which a process claims it."""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.io.resume_rules import NEW_RUN, ConfigChange, changes_on_resume, find_changed_keys
from grmpipe.config.io.yaml_io import explain_old_key, find_missing_keys, read_yaml, to_yaml
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.observe.changes import record_changes
from grmpipe.observe.judge_requests import read_totals
from grmpipe.observe.spending import Spending, explain_nothing_left
from grmpipe.run_dir.checkpoints import Checkpoints, load_state
from grmpipe.run_dir.identity import RunIdentity, check_inputs, input_files, read_identity, read_run_id

log = logging.getLogger(__name__)

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


# -- a claimed directory -----------------------------------------------------------------------------------------------


LOCK_FILE = ".lock"
FILES = (".json", ".jsonl", ".yaml", ".log", ".html")
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no locks
OWNER_ONLY = 0o700  # for a run's directory: it holds prompts and answers


class RunLock(ExitStack):
    """The lock on a run's directory, used as a context: no other process writes there until the end of the block.

    A resumed run is locked at once, a new one by `open`, after all checks.
    """

    def __init__(self, config: RunConfig) -> None:
        """Find the run's directory. Raises ConfigError if it can't be used."""
        super().__init__()
        self._config = config
        try:
            if (run_dir := run_to_resume(config)) is not None and not is_complete(run_dir, config):
                self.enter_context(hold_lock(run_dir))
            self.place = locate_run(config)
            if self.place.resumed and not self.place.complete:
                self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        """Check a run that is resumed."""
        totals = read_totals(self.place.run_dir)
        spending = Spending(self._config.prices, self._config.budget, totals)
        if words := explain_nothing_left(spending, totals.stopped_at):
            raise ConfigError(words)
        if (identity := read_identity(self.place.run_dir)) is not None:
            check_inputs(identity, input_files(self._config), self.place.run_dir)
            check_checkpoint(identity, self.place)
        run_dir, done, wanted = self.place.run_dir, steps_done(self.place), self._config.train.num_steps
        if done > wanted:
            raise ConfigError(f"train.num_steps: {wanted}, but {run_dir} has completed {done}; type {done} or more")

    def open(self) -> Path:
        """Write the first files. Returns the run's directory."""
        try:
            if not self.place.resumed:
                self._make()
            if read_identity(self.place.run_dir) is None:
                RunIdentity.new(input_files(self._config)).write(self.place.run_dir)
            if self.place.changes:
                self._change()
            point_latest(self.place.run_dir, self._config)
        except OSError as error:
            raise ConfigError(f"run_dir: {self.place.run_dir} can't be written to ({error}); type another") from error
        return self.place.run_dir

    def _change(self) -> None:
        """Record the changes of this resume; they apply from now on."""
        place = self.place
        record_changes(place.run_dir, read_run_id(place.run_dir), steps_done(place), place.changes)
        self._write_config(place.run_dir)

    def _make(self) -> None:
        """Make a directory that no other run has: if the user gave no name, under the next free name."""
        run_dir = self.place.run_dir
        if self._config.run_dir is None:
            run_dir = make_first(run_dir)
        else:
            run_dir.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
        self.place = RunLocation(run_dir=run_dir)
        self.enter_context(hold_lock(run_dir))
        if any(run_dir.glob("checkpoints/step_*")):
            raise ConfigError(
                f"run_dir: {run_dir} holds checkpoints without their config.yaml; type another run_dir, or remove them"
            )
        if folders := sorted(path.name for path in run_dir.iterdir() if path.suffix in FILES and path.is_dir()):
            raise ConfigError(
                f"run_dir: {run_dir} has folders in the places of files: {', '.join(folders)}; remove them, or type "
                "another run_dir"
            )
        if holds_run(run_dir):  # another process began it since `locate_run`
            raise refusal(run_dir, self._config.task)
        self._write_config(run_dir)

    def _write_config(self, run_dir: Path) -> None:
        draft = run_dir / "config.yaml.tmp"
        draft.write_text(to_yaml(self._config), encoding="utf-8")
        draft.replace(run_dir / "config.yaml")


def steps_done(place: RunLocation) -> int:
    """The step from which the run continues."""
    return 0 if place.checkpoint is None else load_state(place.checkpoint).pipeline_state.version


def check_checkpoint(identity: RunIdentity, place: RunLocation) -> None:
    """Raises ConfigError for a checkpoint that another run left in the directory."""
    if place.checkpoint is not None and (found := load_state(place.checkpoint).run_id) not in ("", identity.run_id):
        raise ConfigError(
            f"resume: {place.checkpoint} is a checkpoint of run {found}, and {place.run_dir} holds run "
            f"{identity.run_id}; remove what belongs to the other one, or {NEW_RUN}"
        )


def make_first(wanted: Path) -> Path:
    """Make the directory of this name, or of the next free one."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for path in new_run_dirs(wanted):
        try:
            path.mkdir(OWNER_ONLY)
        except FileExistsError:
            continue
        return path
    raise OSError(f"{wanted} and all following names are taken")


@contextmanager
def hold_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock until the end of the block, or of the process in any way. Raises ConfigError that names the
    holder.
    """
    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"run_dir: {run_dir} can't be locked ({error}); make {LOCK_FILE} there a file that can be written, or type "
            "another run_dir"
        ) from error
    try:
        take(descriptor, run_dir)
        yield
    finally:
        os.close(descriptor)


def take(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").strip() or "another process"
        raise ConfigError(
            f"run_dir: {run_dir} is in use by {holder}; wait until it ends, stop it, or type another run_dir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s is on a file system without locks: make sure that no other process writes there", run_dir)
        return
    with contextlib.suppress(OSError):  # on a full disk the lock has no holder's name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{this_process()}\n".encode(), 0)


def this_process() -> str:
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"
