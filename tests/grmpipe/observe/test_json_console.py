"""The console's lines as JSON: everything that a run says on standard output can be parsed."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

from rich.text import Text

from grmpipe.observe.json_console import JsonConsole, JsonConsoleSink
from grmpipe.observe.logs import setup_logging

ROOT = Path(__file__).parents[3]


def test_every_line_of_a_run_is_an_object_and_a_step_has_its_metrics(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable, str(ROOT / "launch.py"), "+experiment=quickstart", "cluster=inprocess", "judge=rule",
            "tracking=none", "tracking.json_logging=true", "train.num_steps=2", "train.groups_per_batch=2",
            "train.group_size=2", "data.num_eval_prompts=4", f"run_dir={tmp_path / 'run'}",
        ],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=240, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert all({"timestamp", "level", "message", "type"} <= line.keys() for line in lines)
    steps = [line for line in lines if line["type"] == "step"]
    kept = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line, metrics in zip(steps, kept, strict=True):
        assert {name: line[name] for name in metrics.keys() - {"time", "run"}} == {
            name: value for name, value in metrics.items() if name not in ("time", "run")
        }
    (end,) = (line for line in lines if line["type"] == "end")
    assert (end["level"], end["status"], end["failure"]) == ("INFO", "completed", None)
    assert lines[-1]["run_dir"] == str(tmp_path / "run")


def test_warnings_alarms_and_what_others_print_are_lines_of_their_own(tmp_path: Path, restored_logging: None) -> None:
    file = io.StringIO()
    console = JsonConsole(file)
    sink = JsonConsoleSink(9, console)
    setup_logging(tmp_path, console)
    logging.getLogger("grmpipe.judge").warning("it is\nslow: %s", "\x1b[2J")
    logging.getLogger("grmpipe.judge").info("run.log has it")
    sink.alarm("the judge [red]is fooled")
    sink.log(3, {"train/loss": float("nan"), "train/true_accuracy": 0.5})
    console.print(Text("x" * 500, style="dim"), soft_wrap=True)
    sink.end("failed", "no engine is left")
    found = [json.loads(line) for line in file.getvalue().splitlines()]
    for line in found:
        line.pop("timestamp")
    assert found[0] | {"message": ""} == {"level": "WARNING", "message": "", "type": "log", "logger": "grmpipe.judge"}
    assert found[0]["message"].startswith("it is\nslow: ") and "\x1b" not in found[0]["message"]
    assert found[1] == {"level": "WARNING", "message": "the judge [red]is fooled", "type": "alarm"}
    assert found[2]["train/loss"] is None and (found[2]["step"], found[2]["train/true_accuracy"]) == (3, 0.5)
    assert found[3] == {"level": "INFO", "message": "x" * 500, "type": "note"}
    assert (found[4]["level"], found[4]["message"]) == ("ERROR", "failed: no engine is left")
    assert len(found) == 5
