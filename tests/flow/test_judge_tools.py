"""Judges with tools in whole runs: with a server of tools, trained beside the policy, behind HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from two_nodes import free_port
from viewer_client import fetch

from grmpipe.cli import compose
from grmpipe.observe.recorder import load_rollouts
from grmpipe.tasks import run_task

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
SERVER = f"[{sys.executable}, {ROOT}/tests/grmpipe/envs/tools/mcp_calculator.py]"
BY_SERVER = (
    f"+judge.tools.mcp.calc={{command: {SERVER}, shared: true, tools: [add]}}", "judge.tools.max_calls=2",
    "judge.max_new_tokens=96", "judge.tools.max_result_chars=8", "judge.format.ask_verdict=true",
)  # fmt: skip


def scores(lines: list[dict]) -> dict[tuple[str, int], float]:
    return {(line["group_id"], line["sibling"]): line["verdict"]["score"] for line in lines if "verdict" in line}


def test_a_judge_with_a_server_of_tools_judges_a_run_judges_again_and_is_shown(small_run: Callable[..., Any]) -> None:
    files = small_run(*BY_SERVER, "grm.path=tiny://policy_tools", "train.num_steps=1", "train.groups_per_batch=2")
    judging, lines = files.summary["judging"], files.lines("judgements")
    said = [
        one["completion"] for line in lines for one in (*line["judgements"], *line["failures"]) if "completion" in one
    ]
    results = [one for each in said for one in each.get("tool_results", ()) if one["end"] > one["start"]]
    assert judging["tool_calls"] > 0 and results and all(one["took_s"] >= 0 for one in results)
    assert "called tools" in (files.run_dir / "report.html").read_text()
    called = next(line for line in lines if any(one["completion"].get("tool_results") for one in line["judgements"]))
    (page,) = fetch(
        files.run_dir, f"/group/{files.run_dir.name}?group={called['group_id']}&sibling={called['sibling']}"
    )
    assert "\n| tool" in page
    run_task(compose(None, ["task=rejudge", f"run_dir={files.run_dir}", "rejudge.name=again"]))
    again = type(files)(files.run_dir / "rejudged" / "again")
    assert scores(again.lines("judgements")) == scores(lines) != {}
    assert again.summary["judging"]["tool_calls"] == judging["tool_calls"]


def test_a_judge_that_learns_beside_the_policy_is_trained_on_none_of_its_tools_words(
    small_run: Callable[..., Any],
) -> None:
    files = small_run(
        "grm=tiny_calculator", "grm.train.data_path=tiny://sums", "grm.train.warmup_steps=1", "train.num_steps=2",
        "grm.train.prompts_per_batch=2", "grm.train.group_size=4", "grm.train.num_items=16", "judge.max_new_tokens=96",
        "judge.tools.functions=grmpipe.tiny.tools", "judge.tools.max_calls=2", "judge.tools.max_result_chars=8",
        "judge.format.ask_verdict=true", "train.groups_per_batch=2", "data.num_eval_prompts=4", experiment="cotrain",
    )  # fmt: skip
    own = type(files)(files.run_dir / "cotrain" / "grm")
    played = {
        (line.rollout.group_id, line.rollout.sibling): line.rollout
        for line in load_rollouts(own.run_dir / "rollouts.jsonl")
    }
    sampled = Counter[int]()
    inserted = Counter[int]()
    for line in own.lines("trained"):
        rollout = played[line["group_id"], line["sibling"]]
        sampled[line["step"]] += rollout.num_sampled_tokens
        inserted[line["step"]] += sum(len(turn.new_ids) for turn in rollout.turns[1:])
    assert files.summary["versions"]["grm"] > 1 and all(inserted.values()), "the judge learns, and calls"
    for step in files.steps():
        assert step["grm/loss_tokens"] == sampled[int(step["grm/version"])]


def test_a_served_judge_with_a_server_of_tools_calls_it_and_repeats_itself(tmp_path: Path) -> None:
    port = free_port()
    command = [
        sys.executable, str(ROOT / "launch.py"), "task=serve", "cluster=inprocess", f"run_dir={tmp_path / 'service'}",
        f"serve.port={port}", "grm.path=tiny://grm_calculator", *BY_SERVER,
    ]  # fmt: skip
    service = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        while True:
            assert service.poll() is None, "the service ended"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                time.sleep(0.5)
        asked = {
            "prompt_id": "a",
            "prompt": "Lea has 27 pens. She gets 25. How many pens does Lea have?",
            "responses": ["Answer: 52", "Answer: 53"],
        }
        answers = []
        for _ in range(2):
            url = f"http://127.0.0.1:{port}/v1/judge"
            with urllib.request.urlopen(url, data=json.dumps(asked).encode()) as answer:
                answers.append(json.load(answer)["verdicts"])
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait()
    assert answers[0] == answers[1]
    summary = json.loads((tmp_path / "service" / "summary.json").read_text())
    assert summary["judging"]["tool_calls"] > 0 and "tool\n" in str(answers[0]).replace("\\n", "\n")
