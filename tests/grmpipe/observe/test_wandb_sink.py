"""A real W&B, offline: it asks nothing, has one run over a resume, and no secret in any file."""

from __future__ import annotations

import json
import logging
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

from grmpipe.config.tracking import TrackingConfig
from grmpipe.observe import wandb_sink
from grmpipe.observe.jsonl_sink import JsonlSink
from grmpipe.observe.logs import replace_handlers, setup_logging
from grmpipe.observe.sample_rows import SampleRow
from grmpipe.observe.wandb_sink import WandbSink, modes_to_try

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


def test_offline_a_run_starts_fast_and_leaves_its_history(tmp_path: Path) -> None:
    start_s = time.perf_counter()
    sink = WandbSink(TrackingConfig(run_name="first", tags=["quick"]), tmp_path, {"train": {"lr": 3e-4}})
    took_s = time.perf_counter() - start_s
    for step in (1, 2):
        sink.log(step, {"train/grm_score": 4.0 + step})
    sink.close()
    assert history(tmp_path) == [{"step": 1, "train/grm_score": 5.0}, {"step": 2, "train/grm_score": 6.0}]
    (run,) = (record.run for record in records(tmp_path) if record.HasField("run"))
    assert (run.run_id, run.project, run.display_name, list(run.tags)) == (sink.run_id, "grmpipe", "first", ["quick"])
    assert took_s < 20  # 0.7 s on a quiet machine, 9 s seen on a crowded one
    print(f"started in {took_s:.2f} s")


def test_a_start_that_takes_long_holds_up_nobody_who_logs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, float]] = []
    may_start = threading.Event()

    def slow_start(*_: object) -> Any:
        assert may_start.wait(30)
        return SimpleNamespace(log=logged.append, finish=lambda: None)

    monkeypatch.setattr(wandb_sink, "start", slow_start)
    sink = WandbSink(TrackingConfig(), tmp_path, {})
    assert sink.run_id, "a checkpoint needs it before the start is over"
    may_start.set()
    sink.log(1, {"x": 1.0})
    sink.close()
    sink.log(2, {"x": 2.0})
    assert logged == [{"step": 1, "x": 1.0}]


def in_another_process(run_dir: Path, step: int) -> list[str]:
    """The command of a short run, which logs only `step`."""
    code = (
        "from pathlib import Path; from grmpipe.config.tracking import TrackingConfig;"
        "from grmpipe.observe.wandb_sink import WandbSink;"
        f"sink = WandbSink(TrackingConfig(), Path({str(run_dir)!r}), {{}}, run_id='the-run');"
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


def test_tables_of_rollouts_come_every_so_many_steps_with_so_many_rows(tmp_path: Path) -> None:
    sink = WandbSink(TrackingConfig(table_every=10, table_rows=2), tmp_path, {})
    for step in range(5, 21, 5):
        sink.table(step, [ROW] * 3)
    sink.close()
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted(table["data"][0][0] for table in tables) == [10, 20]
    assert [len(table["data"]) for table in tables] == [2, 2]
    assert dict(zip(tables[0]["columns"], tables[0]["data"][0], strict=True))["critique"] == "Score: 10"


def test_the_planted_secret_is_in_no_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    monkeypatch.setenv("JUDGE_API_KEY", PLANTED[::-1])
    monkeypatch.setattr(sys, "argv", ["launch.py", f"grm.api_key={PLANTED}"])
    setup_logging(tmp_path)
    try:
        config = {"grm": {"api_key": "in the config only", "url": f"http://{PLANTED[::-1]}@judge"}, "note": PLANTED}
        sink = WandbSink(TrackingConfig(wandb_mode="offline"), tmp_path, config)
        sink.log(10, {"x": 1.0})
        leaky = SampleRow(
            group_id="g", sibling=0, question="q", answer=PLANTED, critique=PLANTED[::-1], score=None, truth=None
        )
        sink.table(10, [leaky])
        sink.close()
        JsonlSink(tmp_path / "metrics.jsonl").log(10, {"x": 1.0})
        logging.getLogger("grmpipe").warning("refused by http://%s@judge", PLANTED[::-1])
    finally:
        replace_handlers(logging.getLogger())
        replace_handlers(logging.getLogger("grmpipe"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.log", "metrics.jsonl", "debug.log"} <= {path.name for path in files}
    printed = "".join(capfd.readouterr()).encode()
    for content in [printed, *(path.read_bytes() for path in files)]:
        for secret in (PLANTED, PLANTED[::-1], "in the config only"):
            assert secret.encode() not in content
    (uploaded,) = (path.read_bytes() for path in files if path.suffix == ".wandb")
    assert b"<redacted>" in uploaded  # the config is in it


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


def test_what_cannot_go_online_goes_offline_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_sink, "START_TIMEOUT_S", 0.5)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    sink = WandbSink(TrackingConfig(), tmp_path, {})
    sink.log(1, {"x": 1.0})
    sink.close()
    assert history(tmp_path) == [{"step": 1, "x": 1.0}]
    assert all(path.name.endswith(sink.run_id) for path in tmp_path.glob("wandb/*run-*/"))


def test_disabled_leaves_nothing_and_keeps_the_id(tmp_path: Path) -> None:
    sink = WandbSink(TrackingConfig(wandb_mode="disabled"), tmp_path, {}, run_id="abc")
    sink.log(1, {"x": 1.0})
    sink.table(10, [ROW])
    sink.close()
    assert (sink.run_id, list(tmp_path.iterdir())) == ("abc", [])


@pytest.mark.parametrize(
    ("mode", "environ", "tried"),
    [
        ("auto", {}, ("offline",)),
        ("auto", {"WANDB_API_KEY": ""}, ("offline",)),
        ("auto", {"WANDB_API_KEY": "k"}, ("online", "offline")),
        ("online", {}, ("online", "offline")),
        ("offline", {"WANDB_API_KEY": "k"}, ("offline",)),
        ("disabled", {"WANDB_API_KEY": "k"}, ()),
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
