"""The thread that follows runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from viewed_run import answer, write_run

from grmpipe.observe.recorder import Recorder
from grmpipe.types import Prompt
from grmpipe.viewer import indexer as indexer_module
from grmpipe.viewer.indexer import Indexer
from grmpipe.viewer.runs import find_runs


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def test_the_indexer_follows_a_run_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(indexer_module, "PAUSE_S", 0.01)
    run = find_runs(write_run(tmp_path / "run"))["run"]
    indexer = Indexer()
    indexer.start()
    try:
        indexer.watch(run)
        wait_until(lambda: "run" in indexer.progress and indexer.progress["run"].share == 1)
        done = indexer.progress["run"].done
        recorder = Recorder(run.run_dir)
        recorder.rollout(2, Prompt(prompt_id="p9", messages=()), answer("g3", 0, "later"))
        recorder.close()
        wait_until(lambda: indexer.progress["run"].done > done)
    finally:
        indexer.stop()
    assert indexer.problems == {}


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    indexer = Indexer()
    indexer.start()
    try:
        indexer.watch(find_runs(write_run(tmp_path / "run"))["run"])
        wait_until(lambda: "the index can't be written" in indexer.problems.get("run", ""))
    finally:
        indexer.stop()
