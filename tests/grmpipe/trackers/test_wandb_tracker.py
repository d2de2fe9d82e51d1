"""A real W&B, offline: it asks nothing, has one run over a resume, and no secret in any file."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grmpipe.trackers import wandb_tracker
from grmpipe.trackers.tracker import SampleRow, TrackedRun
from grmpipe.trackers.wandb_tracker import WandbConfig, WandbTracker, modes_to_try

PLANTED = "planted0123456789planted0123456789planted"
ROW = SampleRow(
    group_id="g0", sibling=0, question="1 + 1?", answer="Answer: 2", critique="Score: 10", score=10.0, truth=1.0
)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no netrc either


def records(run_dir: Path) -> Iterator[Any]:
    """The records that `wandb sync` would send: in blocks of 32 KiB, each after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                yield wandb_internal_pb2.Record.FromString(whole)
                whole = b""


def history(run_dir: Path) -> list[dict[str, object]]:
    found = [record.history for record in records(run_dir) if record.HasField("history")]
    items = [{(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in row.item} for row in found]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in items]


def tracked(run_dir: Path, **config: object) -> TrackedRun:
    return TrackedRun(run_dir=run_dir, config=config, state={})


def test_offline_a_run_starts_fast_and_leaves_its_history(tmp_path: Path) -> None:
    start_s = time.perf_counter()
    sink = WandbTracker(WandbConfig(run_name="first", tags=["quick"]), tracked(tmp_path, train={"lr": 3e-4}))
    took_s = time.perf_counter() - start_s
    for step in (1, 2):
        sink.log(step, {"train/grm_score": 4.0 + step})
    sink.close()
    assert history(tmp_path) == [{"step": 1, "train/grm_score": 5.0}, {"step": 2, "train/grm_score": 6.0}]
    (run,) = (record.run for record in records(tmp_path) if record.HasField("run"))
    assert (run.project, run.display_name, list(run.tags)) == ("grmpipe", "first", ["quick"])
    assert sink.resume_state() == {"run_id": run.run_id}
    assert took_s < 20  # 0.7 s on a quiet machine, 9 s seen on a crowded one
    print(f"started in {took_s:.2f} s")


def test_a_run_of_a_team_leaves_its_group_alarms_and_that_it_failed(tmp_path: Path) -> None:
    sink = WandbTracker(WandbConfig(entity="team", group="seeds"), tracked(tmp_path))
    sink.log(1, {"x": 1.0})
    sink.alarm("scores rise, truth falls")
    sink.end("failed", "out of memory")
    sink.close()
    found = list(records(tmp_path))
    (run,) = (record.run for record in found if record.HasField("run"))
    (alert,) = (record.alert for record in found if record.HasField("alert"))
    (end,) = (record.exit for record in found if record.HasField("exit"))
    assert (run.entity, run.run_group) == ("team", "seeds")
    assert (alert.title, alert.text, alert.level) == ("alarm", "scores rise, truth falls", "WARN")
    assert end.exit_code == 1


def test_slow_start_does_not_delay_a_run_that_logs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    may_start = threading.Event()

    def slow_start(*_: object) -> Any:
        assert may_start.wait(30)
        return SimpleNamespace(log=logged.append, finish=lambda exit_code: None)

    monkeypatch.setattr(wandb_tracker, "start", slow_start)
    sink = WandbTracker(WandbConfig(), tracked(tmp_path))
    assert sink.resume_state()["run_id"], "a checkpoint needs it before the start is over"
    may_start.set()
    sink.log(1, {"x": 1.0})
    sink.close()
    assert logged == [{"step": 1, "x": 1.0}]


def in_another_process(run_dir: Path, step: int) -> list[str]:
    """The command of a short run, which logs only `step`."""
    code = (
        "from pathlib import Path; from grmpipe.trackers.tracker import TrackedRun;"
        "from grmpipe.trackers.wandb_tracker import WandbConfig;"
        f"run = TrackedRun(run_dir=Path({str(run_dir)!r}), config={{}}, state={{'run_id': 'the-run'}});"
        "sink = WandbConfig().open(run);"
        f"sink.log({step}, {{'x': {step}.0}}); sink.close()"
    )
    return [sys.executable, "-c", code]


def test_a_resumed_run_is_the_same_run_on_the_same_step_axis(tmp_path: Path) -> None:
    for step in (1, 2):
        subprocess.run(in_another_process(tmp_path, step), check=True)
    assert history(tmp_path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}]
    names = {(record.run.run_id, record.run.display_name) for record in records(tmp_path) if record.HasField("run")}
    assert names == {("the-run", tmp_path.name)}, "named after its folder"
    axes = [record.metric.step_metric for record in records(tmp_path) if record.metric.glob_name == "*"]
    assert axes == ["step", "step"]


def test_a_table_has_a_row_per_rollout_with_its_step(tmp_path: Path) -> None:
    sink = WandbTracker(WandbConfig(), tracked(tmp_path))
    for step in (10, 20):
        sink.table(step, [ROW] * 2)
    sink.close()
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted(table["data"][0][0] for table in tables) == [10, 20]
    assert [len(table["data"]) for table in tables] == [2, 2]
    assert dict(zip(tables[0]["columns"], tables[0]["data"][0], strict=True))["critique"] == "Score: 10"


def test_in_a_terminal_without_a_key_nothing_is_asked_and_nothing_printed(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(in_another_process(tmp_path, 1), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        assert child.wait(timeout=60) == 0
        printed = read_all(ours)
    finally:
        child.kill()
        os.close(ours)
    assert printed == b""
    assert history(tmp_path) == [{"step": 1, "x": 1.0}]


def read_all(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # a terminal whose other end is closed and which holds nothing
        return b""


def test_run_that_can_not_go_online_continues_offline_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_tracker, "START_TIMEOUT_S", 0.5)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    sink = WandbTracker(WandbConfig(), tracked(tmp_path))
    sink.log(1, {"x": 1.0})
    sink.close()
    assert history(tmp_path) == [{"step": 1, "x": 1.0}]
    assert all(path.name.endswith(sink.resume_state()["run_id"]) for path in tmp_path.glob("wandb/*run-*/"))


def test_without_any_mode_that_starts_each_call_raises_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wandb_tracker, "start", refused)
    sink = WandbTracker(WandbConfig(), tracked(tmp_path))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="W&B did not start: .*No space left"):
            sink.log(1, {"x": 1.0})


@pytest.mark.parametrize(
    ("mode", "environ", "tried"),
    [
        ("auto", {}, ("offline",)),
        ("auto", {"WANDB_API_KEY": ""}, ("offline",)),
        ("auto", {"WANDB_API_KEY": "k"}, ("online", "offline")),
        ("online", {}, ("online", "offline")),
        ("offline", {"WANDB_API_KEY": "k"}, ("offline",)),
    ],
)
def test_online_needs_a_key_or_a_wish(mode: str, environ: dict[str, str], tried: tuple[str, ...]) -> None:
    assert modes_to_try(mode, environ) == tried


def test_no_other_thread_than_the_caller_parses_source(tmp_path: Path) -> None:
    """In a process of its own: a module is imported once."""
    code = f"""
import builtins, threading
parsed_in = []
compile_source = builtins.compile
def compile(source, filename, mode, flags=0, *args, **options):
    if flags & 0x400:  # ast.PyCF_ONLY_AST
        parsed_in.append(threading.current_thread() is threading.main_thread())
    return compile_source(source, filename, mode, flags, *args, **options)
builtins.compile = compile
{in_another_process(tmp_path, 1)[-1]}
assert parsed_in and all(parsed_in), f"{{parsed_in.count(False)}} of {{len(parsed_in)}} in other threads"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
