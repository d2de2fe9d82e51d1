"""Claims a run's directory for this process: finds or makes it, locks it, writes its first files."""

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from grmpipe.config.io.resume_rules import NEW_RUN
from grmpipe.config.io.yaml_io import to_yaml
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.observe.changes import record_changes
from grmpipe.observe.judge_requests import read_totals
from grmpipe.observe.spending import Spending, explain_nothing_left
from grmpipe.run_dir.checkpoints import load_state
from grmpipe.run_dir.directory import (
    RunLocation,
    holds_run,
    is_complete,
    locate_run,
    new_run_dirs,
    point_latest,
    refusal,
    run_to_resume,
)
from grmpipe.run_dir.identity import RunIdentity, check_inputs, input_files, read_identity, read_run_id

log = logging.getLogger(__name__)

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
