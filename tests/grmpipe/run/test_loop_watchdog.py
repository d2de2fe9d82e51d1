"""A user's code that blocks the event loop is named, with its line and the way out."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from grmpipe.models.types import Message
from grmpipe.run import loop_watchdog
from grmpipe.run.loop_watchdog import OURS, is_users, watch_loop
from grmpipe.types import Prompt
from grmpipe.workflows.chat import ChatReply
from grmpipe.workflows.in_process import InProcess
from grmpipe.workflows.policy import ChatEndpoint, Policy, Task

LIMITS = StageLimits(boot_s=5, step_s=0.1, close_s=5, max_observation_chars=100)


@pytest.fixture(autouse=True)
def watchdog_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watchdog, "CHECK_S", 0.02)
    monkeypatch.setattr(loop_watchdog, "BLOCKED_S", 0.1)


class Blocks:
    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=[Message(role="user", content="?")])

    async def step(self, action: Action) -> Observation:
        time.sleep(0.5)  # noqa: ASYNC251
        return Observation(done=True)

    async def close(self) -> None:
        pass


async def never(*_: object) -> ChatReply:
    raise AssertionError("it asks nothing")


async def solve(task: Task, policy: Policy) -> None:
    time.sleep(0.3)  # noqa: ASYNC251


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_an_environment_that_blocks_is_named_with_its_line_and_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with watch_loop():
            await asyncio.sleep(0.2)  # a loop that waits doesn't stand still
            env = LimitedEnv(Blocks(), LIMITS)
            await env.open(Episode(prompt=Prompt(prompt_id="p", messages=())))
            await env.step(Action(text=""))
            await asyncio.sleep(0.05)

    asyncio.run(main())
    first, again, on = warnings(caplog)
    said = f"env.step, in Blocks.step ({__file__}:"
    assert said in first and ": time.sleep(0.5)" in first and "type env.isolation.kind=process" in first
    assert said in again and on.startswith("the event loop goes on, after ")


def test_blocking_workflow_is_told_where_it_may_block(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blocking_flow", sys.modules[__name__])

    async def main() -> None:
        with watch_loop():
            policy = Policy(never, lambda: ChatEndpoint(base_url="", api_key=""))
            await InProcess("blocking_flow.solve", {}).solve(Task(messages=()), policy)

    asyncio.run(main())
    assert "in solve (" in warnings(caplog)[0] and "type env.runs_in=process" in warnings(caplog)[0]


def test_installed_code_is_not_the_users_wherever_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib-1.dist-info").mkdir()
    (tmp_path / "lib-1.dist-info" / "RECORD").write_text("lib/__init__.py,sha256=x,1\nsingle.py,,\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    libraries = (
        asyncio.__file__, "<frozen importlib._bootstrap>", f"{tmp_path}/lib/deep.py", f"{tmp_path}/single.py",
        "/home/me/.local/lib/python3.11/site-packages/numpy/core.py", "/usr/lib/python3/dist-packages/yaml/__init__.py",
        "/opt/other/env/lib/python3.12/site-packages/torch/nn.py",
    )  # fmt: skip
    users = (f"{tmp_path}/my_env.py", "/home/me/lab/src/edited/env.py", "/home/me/lib-1/x.py", __file__)
    assert {file for file in (*libraries, *users) if is_users(file)} == {*users}


def test_block_by_our_own_code_is_only_in_the_log_file(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with watch_loop():
            asyncio.get_running_loop().call_soon(
                exec, compile("import time; time.sleep(0.15)", OURS[2] + "x.py", "exec")
            )
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)

    caplog.set_level(logging.INFO)
    asyncio.run(main())
    assert warnings(caplog) == []
    assert f"a callback, in <module> ({OURS[2]}x.py:1" in caplog.records[0].message


def test_a_user_who_awaits_what_blocks_in_a_library_that_we_call_is_not_told_to_await(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours: dict[str, Any] = {}
    source = "import threading\nasync def forward(): threading.Event().wait(0.15)"
    exec(compile(source, f"{OURS[0]}x.py", "exec"), ours)

    async def main() -> None:
        with watch_loop():
            await asyncio.sleep(0.05)
            await ours["forward"]()
            await asyncio.sleep(0.05)

    caplog.set_level(logging.INFO)
    asyncio.run(main())
    assert warnings(caplog) == []
    note = caplog.records[0].message
    assert "/threading.py:" in note and f", which grmpipe's forward ({OURS[0]}x.py:2" in note and "Await" not in note
