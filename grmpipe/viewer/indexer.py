"""The thread that keeps the indexes of the viewed runs up to date."""

import logging
import sqlite3
import sys
import threading
import time

from grmpipe.viewer.figures import keep_figures
from grmpipe.viewer.index import IndexProgress
from grmpipe.viewer.runs import ViewedRun

log = logging.getLogger(__name__)

PAUSE_S = 2.0  # between two looks at the journals
SAY_EVERY_S = 5.0


class Indexer:
    """Follows runs from their first page on, one after the other."""

    def __init__(self) -> None:
        self.progress: dict[str, IndexProgress] = {}  # by the run's name
        self.problems: dict[str, str] = {}
        self._runs: dict[str, ViewedRun] = {}
        self._kept: dict[str, IndexProgress] = {}  # by the run's name: the state whose figures are in its index
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="viewer-index", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=10)

    def watch(self, run: ViewedRun) -> None:
        """Follow this run from now on."""
        if run.name not in self._runs:
            self._runs = {run.name: run, **self._runs}  # the newest first: someone waits for it
            self._wake.set()

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            for run in [*self._runs.values()]:
                try:
                    self._follow(run)
                    self.problems.pop(run.name, None)
                except (OSError, sqlite3.Error) as error:
                    self.problems[run.name] = f"the index can't be written: {error}"
                except Exception as error:  # other runs go on, and this one is tried again
                    problem = f"its index can't be made: {error!r}"
                    if self.problems.get(run.name) != problem:
                        log.error("%s: %s", run.name, problem, exc_info=True)
                    self.problems[run.name] = problem
            self._wake.wait(PAUSE_S)

    def _follow(self, run: ViewedRun) -> None:
        began = said = time.monotonic()
        first = None
        for progress in run.index.follow():
            self.progress[run.name] = progress
            first = first or progress
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                print(f"grmpipe: index of {run.name}: {progress.share:.0%}", file=sys.stderr, flush=True)
            if self._stopping.is_set():
                return
        if first == self.progress.get(run.name) is not None:  # nothing new: there is time for what the first page shows
            self._keep_figures(run)
        if said > began and first is not None:
            read_mb, took_s = (self.progress[run.name].done - first.done) / 1e6, time.monotonic() - began
            print(f"grmpipe: index of {run.name}: {read_mb:.0f} MB in {took_s:.1f} s", file=sys.stderr, flush=True)

    def _keep_figures(self, run: ViewedRun) -> None:
        state = run.index.progress()
        if self._kept.get(run.name) != state:
            keep_figures(run.index, state)
            self._kept[run.name] = state
