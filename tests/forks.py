"""Runs scripts in forks of a process that has made their imports, which saves seconds per start. Used by conftest.py.

The script itself runs as `__main__`, in its own process that can be killed. test_quickstart.py and the doctor of
test_tasks.py start scripts as a user does.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# grmpipe.tasks by itself imports little: what a run of it imports, and its learner and engines, are named too.
IMPORTED = [
    "pytest",
    "hydra",
    "grmpipe.tasks",
    "grmpipe.run.tasks.train",
    "grmpipe.train.learner.learner",
    "grmpipe.train.critic.critic_learner",
    "grmpipe.models.engines.embedded.embedded_engine",
]
FORKS = multiprocessing.get_context("forkserver")


def serve() -> None:
    """Import everything in a process that forks from now on, with the present environment."""
    FORKS.set_forkserver_preload(IMPORTED)
    multiprocessing.forkserver.ensure_running()


def handle_as_in_foreground(*numbers: signal.Signals) -> None:
    """Give signals their usual handlers: a process in the background ignores SIGINT, one under nohup SIGHUP."""
    for number in numbers:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def run(
    script: str, arguments: tuple[str, ...], cwd: str, environment: Mapping[str, str], output: str, errors: str
) -> None:
    """Run a script like `python script ...` there; it prints to the files `output` and `errors`."""
    for number, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    handle_as_in_foreground(signal.SIGINT, signal.SIGHUP)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without them


class Forked:
    """A script that was started."""

    def __init__(self, script: Path, *arguments: object, cwd: Path | None = None, **environment: str) -> None:
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  as long as this is kept
        self._errors = tempfile.NamedTemporaryFile()  # noqa: SIM115
        files = (self._output.name, self._errors.name)
        self._process = FORKS.Process(
            target=run,
            args=(str(script), tuple(map(str, arguments)), str(cwd or Path.cwd()), environment, *files),
            daemon=True,  # ends with the tests
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    @property
    def output(self) -> str:
        """All that it printed: first stderr, then stdout."""
        return self.errors + Path(self._output.name).read_text()

    @property
    def errors(self) -> str:
        return Path(self._errors.name).read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 240.0) -> int:
        """Return the exit code; below 0 the signal that ended it."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"it did not end within {timeout_s:.0f} s:\n{self.output[-3000:]}")
        return self._process.exitcode
