"""Whole runs whose episodes are workflows: in the run, in worker processes, and as a program."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grmpipe.config.run_config import ConfigError
from grmpipe.observe.recorder import load_rollouts

SOURCE = '''
"""A user's workflow: two turns, and a reward by their length."""

import numpy as np

CALLED = []


class MaxTurnsExceeded(Exception):
    pass


MaxTurnsExceeded.__module__ = "agents.exceptions"  # openai-agents raises it


async def solve(task, policy, question="Again."):
    CALLED.append(task)
    first = await policy.chat(task.messages)
    second = await policy.chat([*task.messages, first, {"role": "user", "content": question}])
    if len(second.content) % 2:
        raise MaxTurnsExceeded("Max turns (2) exceeded")
    return {"length": np.float32(len(first.content)), first.completion_id: {"first": 2}}


def blocking(task, policy):
    return 1.0


async def no_policy(task):
    return 1.0
'''
PROGRAM = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
asked = json.dumps({"messages": task["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
said = json.load(urllib.request.urlopen(urllib.request.Request(url, asked, headers)))
print(json.dumps(len(said["choices"][0]["message"]["content"])))
"""
WORKFLOW = ("env=workflow", "rollout.max_turns=3", "judge=rule", "judge_monitor.anchors=4", "data.num_eval_prompts=4")


@pytest.fixture(scope="module", autouse=True)
def users_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("users")
    (folder / "users_flow.py").write_text(SOURCE)
    (folder / "agent.py").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def test_a_run_of_a_workflow_trains_on_its_turns(small_run: Callable) -> None:
    files = small_run(
        *WORKFLOW,
        "env.target=users_flow.solve",
        "train.num_steps=2",
        "rollout.stop=[e,' ']",
        "+env.options={question: Twice}",
    )
    files.check_complete(groups=8)
    ended_by_it = num_stopped = 0
    for line in load_rollouts(files.run_dir / "rollouts.jsonl"):
        first, *rest = line.rollout.turns
        assert len(rest) <= 1 and not any(turn.rewritten for turn in rest)
        if any(turn.faults for turn in line.rollout.turns):
            assert rest[0].faults == ("MaxTurnsExceeded",) and not rest[0].rewards
            ended_by_it += 1
        elif line.rollout.status == "finished":
            assert dict(rest[0].rewards) == {"length": len(first.completion.text)}
            assert first.replies[0].content == "Twice" and dict(first.rewards) == {"first": 2.0}
        for turn in line.rollout.turns:
            assert len(turn.completion.logprobs) == len(turn.completion.token_ids)
            assert "e" not in turn.completion.text and turn.completion.stop_text in ("", "e", " ")
            num_stopped += bool(turn.completion.stop_text)
    envs = files.summary["envs"]
    assert (envs["episodes"], envs["faults"], envs["policy_faults"]) == (32, {}, {"MaxTurnsExceeded": ended_by_it})
    assert ended_by_it > 0, "episodes of any length are trained"
    assert num_stopped > 0
    timeline = json.loads((files.run_dir / "timeline.json").read_text())
    assert sum(event["name"] == "step" for event in timeline) >= files.summary["envs"]["turns"]
    assert any(step["env/reward_first"] == 2.0 and step["env/reward_length"] >= 0 for step in files.steps())
    assert max(step.get("env/time_share", 0) for step in files.steps()) > 0


@pytest.mark.long
@pytest.mark.parametrize("place", ["process", "command"])
def test_a_workflow_elsewhere_asks_the_policy_at_the_gateway(
    small_run: Callable, users_module: Path, place: str
) -> None:
    agent = f"env.command=[{sys.executable},-S,{users_module / 'agent.py'}]"
    where = "env.target=users_flow.solve" if place == "process" else agent
    files = small_run(
        *WORKFLOW, f"env.runs_in={place}", where, "train.num_steps=1", "train.groups_per_batch=2", "train.group_size=2"
    )
    files.check_complete(groups=2)
    assert files.summary["envs"]["faults"] == {}
    for child in Path("/proc/self/task").glob("*/children"):
        for pid in child.read_text().split():
            assert "supervisor" not in Path(f"/proc/{pid}/cmdline").read_text(), "a process is left"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.stop=['']", r"^rollout\.stop: a text is empty"),
        ("rollout.stop=['.<|im_end|>']", r"^rollout\.stop: .* has a special token of the policy's tokenizer, which no"),
        ("env=workflow", r"^env\.target: is empty; for kind=workflow"),
        ("env=workflow env.target=users_flow.nothing", r"^env\.target: the module users_flow has no nothing"),
        ("env=workflow env.target=users_flow.no_policy", r"^env\.target: .* takes \(task, policy\)"),
        ("env=workflow env.target=users_flow.blocking", r"^env\.target: .* must be an `async def"),
        (
            "env=workflow env.target=users_flow.solve +env.options={depth: 3}",
            r"^env\.options: users_flow\.solve can't be called with .*'depth'",
        ),
        ("+env.options={depth: 3}", r"^env\.options: is for code of your own"),
        ("env=workflow env.runs_in=command", r"^env\.command: is empty"),
        ("env.policy_errors=[ValueError]", r"^env\.policy_errors: 'ValueError' is no module and name .*builtins\."),
        (
            "env=workflow env.target=users_flow.solve env.policy_errors=[users_flow.TooMany]",
            r"^env\.policy_errors: the module users_flow has no TooMany",
        ),
        (
            "env=workflow env.target=users_flow.solve env.policy_errors=[users_flow.solve]",
            r"^env\.policy_errors: users_flow\.solve is no exception; name a class",
        ),
        ("env=workflow env.runs_in=thread", r"^env\.runs_in: unknown place 'thread'; known: inprocess, process"),
        ("env.runs_in=process", r"^env\.runs_in: is for env\.kind=workflow"),
        ("env=workflow env.target=users_flow.solve env.command=[x]", r"^env\.command: is for .*runs_in=command"),
        (
            "env=workflow env.target=users_flow.solve env.runs_in=process env.isolation.kind=process",
            r"^env\.isolation\.kind: .*a workflow needs the network, .*type env\.isolation\.kind=inprocess",
        ),
        (
            "env=tools +env.mcp.calc.url=http://x env.isolation.kind=process",
            r"^env\.isolation\.kind: .*servers of tools \(mcp\) are processes of their own; type env\.isolation\.kind=",
        ),
        ("env=tools +env.mcp.calc.command=[no-such-program]", r"^env\.mcp\.calc: .*no-such-program can't be started"),
        ("env=tools +env.mcp.calc.url=localhost", r"^env\.mcp\.calc\.url: must begin with http"),
        ("env=workflow env.target=users_flow.solve task=simulate", r"^env\.kind: task=simulate knows only single"),
    ],
)
def test_a_workflow_that_can_not_run_is_refused_by_its_key(small_run: Callable, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small_run(*re.split(r" (?=env|task|\+)", override))
