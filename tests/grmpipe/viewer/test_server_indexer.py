"""The thread that follows runs."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from viewed_run import answer, write_run

from grmpipe.observe.recorder import Recorder
from grmpipe.types import Prompt
from grmpipe.viewer import server as server_module
from grmpipe.viewer.index import IndexProgress, RunIndex
from grmpipe.viewer.runs import find_runs
from grmpipe.viewer.server import Indexer


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def test_the_indexer_follows_a_run_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(server_module, "PAUSE_S", 0.01)
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


def test_the_figures_of_runs_that_stand_still_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(server_module, "PAUSE_S", 0.01)
    first, *others = (tmp_path / "runs" / f"run{n}" for n in range(9))
    write_run(first)
    for other in others:
        shutil.copytree(first, other)
    runs = find_runs(tmp_path / "runs")
    looks: Counter[Path] = Counter()
    kept: Counter[Path] = Counter()
    follow = RunIndex.follow

    def counted_follow(index: RunIndex) -> Iterator[IndexProgress]:
        looks[index.path] += 1
        return follow(index)

    monkeypatch.setattr(RunIndex, "follow", counted_follow)
    monkeypatch.setattr(server_module, "keep_figures", lambda index, state: kept.update([index.path]))
    indexer = Indexer()
    indexer.start()
    try:
        for run in runs.values():
            indexer.watch(run)
        wait_until(lambda: len(kept) == 9 and min(looks.values()) > 6)
    finally:
        indexer.stop()
    assert set(kept.values()) == {1}


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


def test_what_escapes_for_one_run_is_shown_there_and_the_others_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(server_module, "PAUSE_S", 0.01)
    for name in ("bad", "good"):
        write_run(tmp_path / "runs" / name)
    runs = find_runs(tmp_path / "runs")
    follow, broken = RunIndex.follow, True

    def follow_all_but_one(index: RunIndex) -> Iterator[IndexProgress]:
        if broken and index.run_dir.name == "bad":
            raise ZeroDivisionError("of this run")
        return follow(index)

    monkeypatch.setattr(RunIndex, "follow", follow_all_but_one)
    indexer = Indexer()
    indexer.start()
    try:
        indexer.watch(runs["good"])
        indexer.watch(runs["bad"])
        wait_until(lambda: "good" in indexer.progress and indexer.progress["good"].share == 1)
        assert indexer.problems == {"bad": "its index can't be made: ZeroDivisionError('of this run')"}
        broken = False
        wait_until(lambda: "bad" in indexer.progress and not indexer.problems)
    finally:
        indexer.stop()
