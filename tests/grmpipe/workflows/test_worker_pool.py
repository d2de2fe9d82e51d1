"""Workflows in worker processes and as programs: they ask over HTTP, and what kills one harms no other."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.envs.env import EnvFault
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.play import RolloutRequest
from grmpipe.models.types import Message, ignore_first_token
from grmpipe.types import Prompt, Rollout
from grmpipe.workflows.episode_chat import EpisodeChats
from grmpipe.workflows.play_workflow import Solver, WorkflowPlayer
from grmpipe.workflows.program import Program
from grmpipe.workflows.server import Gateway
from grmpipe.workflows.worker_pool import WorkerPool

WORKFLOW = '''
"""A user's workflow: does what the task's information says."""

import os, sys, time

import httpx
import numpy as np

from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.workflows.chat import ChatRefused


class MaxTurnsExceeded(Exception):
    pass


async def solve(task, policy, depth=1):
    what = task.info["what"]
    first = await policy.chat(task.messages)
    print("chatter of the user's code")
    if what == "block":
        time.sleep(0.3)
    elif what == "hang":
        open(task.info["pid"], "w").write(str(os.getpid()))
        time.sleep(60)
    elif what == "die":
        os.kill(os.getpid(), 9)
    elif what == "raise":
        raise KeyError("oops")
    elif what == "exit":
        sys.exit(3)
    elif what == "turns":
        MaxTurnsExceeded.__module__ = "agents.exceptions"
        raise MaxTurnsExceeded("Max turns (1) exceeded")
    elif what == "numpy":
        return {"a": np.float32(0.5), "b": np.bool_(True)}
    elif what == "options":
        return {"depth": depth, first.completion_id: {"format": np.float32(0.5)}}
    elif what == "nan":
        return float("nan")
    elif what == "unknown":
        return {"a": None}
    elif what == "policy":
        raise PolicyFault("no", "path")
    elif what == "env":
        raise EnvFault("full", "capacity")
    elif what == "refused":
        await policy.chat([*task.messages, first, {"role": "user", "content": "x" * 999}])
    elif what == "object":
        return object()
    elif what == "garbage":
        os.write(int(sys.argv[1]), b"garbage\\n")
        time.sleep(60)
    elif what == "http":
        answer = httpx.post(
            policy.base_url + "/chat/completions", trust_env=False,
            json={"messages": [{"role": "user", "content": "by URL"}]},
            headers={"Authorization": "Bearer " + policy.api_key},
        )
        assert answer.status_code == 200, answer.text
    return {"length": len(first.content), "pid": os.getpid()}
'''
PROGRAM = """
import json, os, sys, time, urllib.request

task = json.load(sys.stdin)
what = task["info"]["what"]
ask = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": task["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(ask))
said = answer["choices"][0]["message"]["content"]
print("some log", flush=True)
if what == "hang":
    if os.fork() == 0:
        open(task["info"]["pid"], "w").write(str(os.getpid()))
    time.sleep(60)
if what == "die":
    os.kill(os.getpid(), 9)
if what == "background":
    if os.fork() == 0:
        time.sleep(60)
if what == "daemon":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(task["info"]["pid"], "w").write(str(os.getpid()))
        time.sleep(60)
    while not os.path.exists(task["info"]["pid"]):
        time.sleep(0.01)
if what == "turns":
    MaxTurnsExceeded = type("MaxTurnsExceeded", (Exception,), {"__module__": "agents.exceptions"})
    raise MaxTurnsExceeded("Max turns (1) exceeded")
if what == "fail":
    sys.exit("no such tool")
if what == "options":
    print(json.dumps({"depth": task["options"]["depth"], answer["id"]: {"format": 0.5}}))
elif what != "garbage":
    print(json.dumps({"length": len(said)}))
"""


def prompt(what: str, **info: object) -> Prompt:
    return Prompt(prompt_id="p", messages=(Message(role="user", content="?"),), info={"what": what, **info})


class Playing:
    """Plays episodes with one solver and one gateway."""

    def __init__(self, solver: Solver, chats: EpisodeChats, request: RolloutRequest) -> None:
        self._request = request
        self._chats, self._solver, self._gateway = chats, solver, Gateway()

    async def __call__(self, what: str, *, episode_s: float = 30.0, **info: object) -> Rollout:
        limits = StageLimits(boot_s=1, step_s=min(0.2, episode_s), close_s=5, max_observation_chars=0)
        self._chats.limits = replace(self._chats.limits, episode_s=episode_s)
        player = WorkflowPlayer(self._solver, self._gateway, limits)
        return await player.play(self._chats, self._request, prompt(what, **info), ignore_first_token)

    async def close(self) -> None:
        await self._solver.close()
        await self._gateway.close()


@pytest.fixture
def playing(make_engine: Callable, make_chats: Callable, request_of: RolloutRequest) -> Callable:
    @asynccontextmanager
    async def opened(solver: Solver) -> AsyncIterator[Playing]:
        one = Playing(solver, make_chats(make_engine(), context_tokens=400), request_of)
        try:
            yield one
        finally:
            await one.close()

    return opened


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_workflow.py").write_text(WORKFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "users_workflow.solve"


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM)
    return [sys.executable, "-S", str(path)]


async def fault_of(episode: asyncio.Future[Rollout]) -> tuple[str, str]:
    with pytest.raises(EnvFault) as fault:
        await episode
    return fault.value.cause, str(fault.value)


def lives(pid_file: Path) -> bool:
    """Whether the process whose id is in a file runs."""
    try:
        return Path(f"/proc/{int(pid_file.read_text())}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ValueError):  # ValueError: it isn't written yet
        return False


async def gone(pid_file: Path) -> None:
    async with asyncio.timeout(30):
        while lives(pid_file):
            await asyncio.sleep(0.02)


def test_a_worker_runs_one_episode_after_another_and_what_breaks_is_its_own(
    playing: Callable, target: str, tmp_path: Path
) -> None:
    async def play() -> None:
        async with playing(WorkerPool(target, {"depth": 3})) as episode:
            first = await episode("ok")
            again = await episode("http")
            assert first.env_rewards["length"] == len("over") and len(again.turns) == 2
            assert first.env_rewards["pid"] == again.env_rewards["pid"] != os.getpid()
            assert (await episode("policy")).turns[0].faults == ("path",)
            assert (await episode("refused")).reason == "context"
            assert await fault_of(episode("env")) == ("capacity", "full")
            cause, text = await fault_of(episode("raise"))
            assert cause == "broken"
            assert re.fullmatch(r"users_workflow\.solve \(.*\.py:\d+\) raised KeyError: 'oops' \(.*\.py:\d+\)", text)
            for what, said in (("object", "returned <object"), ("nan", "returned nan"), ("unknown", "returned None")):
                cause, text = await fault_of(episode(what))
                assert cause == "protocol" and said in text and "return None, a finite number" in text
            assert "raised SystemExit: 3" in (await fault_of(episode("exit")))[1]
            assert (await episode("turns")).turns[0].faults == ("MaxTurnsExceeded",)
            assert dict((await episode("numpy")).env_rewards) == {"a": 0.5, "b": 1.0}
            assert dict((await episode("options")).env_rewards) == {"depth": 3.0, "format": 0.5}
            assert (await episode("ok")).env_rewards["pid"] == first.env_rewards["pid"], "errors are no deaths"
            neighbour = asyncio.ensure_future(episode("block"))
            assert (await fault_of(episode("die")))[0] == "died"
            assert (await fault_of(episode("garbage")))[0] == "protocol"
            assert (await neighbour).env_rewards["length"] == len("over")
            hanging = await fault_of(episode("hang", episode_s=1.2, pid=str(tmp_path / "pid")))
            assert hanging[0] == "timeout"
            await gone(tmp_path / "pid")
            assert (await episode("ok")).env_rewards["length"] == len("over")
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())


def test_a_program_is_an_episode_and_all_that_it_started_ends_with_it(
    playing: Callable, program: list[str], tmp_path: Path
) -> None:
    async def play() -> None:
        async with playing(Program(program, {"depth": 3})) as episode:
            assert dict((await episode("options")).env_rewards) == {"depth": 3.0, "format": 0.5}
            assert dict((await episode("ok")).env_rewards) == {"length": len("over")}
            begun_s = time.monotonic()
            assert (await episode("background")).env_rewards["length"] == len("over")
            assert (await episode("daemon", pid=str(tmp_path / "daemon"))).env_rewards["length"] == len("over")
            await gone(tmp_path / "daemon")
            assert time.monotonic() - begun_s < 20, "what stays in the background holds nothing up"
            assert await fault_of(episode("garbage")) == (
                "protocol",
                "the last line that the program printed is no reward in JSON ('some log'): JSON is malformed: invalid "
                "character (byte 0); print its log to stderr",
            )
            cause, text = await fault_of(episode("fail"))
            assert cause == "broken" and "exited with 1: no such tool" in text
            assert (await episode("turns")).turns[0].faults == ("MaxTurnsExceeded",)
            assert (await fault_of(episode("die")))[0] == "died"
            assert (await fault_of(episode("hang", episode_s=1.0, pid=str(tmp_path / "pid"))))[0] == "timeout"
            await gone(tmp_path / "pid")
        async with playing(Program(["no-such-program"], {})) as episode:
            assert "no-such-program can't be started" in (await fault_of(episode("ok")))[1]

    asyncio.run(play())


DRIVER = """
import asyncio, sys
from grmpipe.envs.process_group import start_group

async def main():
    started = f"{sys.argv[2]} sleep 60 & echo $! > $0; wait"
    await start_group(["sh", "-c", started, sys.argv[1]], env={"PATH": "/usr/bin:/bin"})
    print("started", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("first", ["", "setsid"], ids=["in the group", "a daemon"])
def test_a_driver_that_is_killed_takes_its_programs_with_it(tmp_path: Path, first: str) -> None:
    async def run() -> None:
        driver = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DRIVER, str(tmp_path / "pid"), first, stdout=asyncio.subprocess.PIPE
        )
        assert driver.stdout is not None
        assert await driver.stdout.readline() == b"started\n"
        async with asyncio.timeout(30):
            while not lives(tmp_path / "pid"):
                await asyncio.sleep(0.02)
        driver.kill()
        await driver.wait()
        await gone(tmp_path / "pid")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("target", "said"),
    [("nowhere.solve", r"^target: nowhere can't be imported"), ("os.getpid", r"^target: .* takes \(task, policy\)")],
)
def test_a_workflow_that_can_not_be_called_is_refused_by_its_key(target: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WorkerPool(target, {})
