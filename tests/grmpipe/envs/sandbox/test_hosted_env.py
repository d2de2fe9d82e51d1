"""How a worker ended is known even if it ended before the run looked."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

from grmpipe.envs.env import Action, EnvFault, Episode, Opening
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.envs.sandbox.hosted_env import HostedEnv, rebuild_fault
from grmpipe.envs.sandbox.messages import Began, BlamedEnv, Ended, Opened, frame
from grmpipe.envs.sandbox.process_host import ProcessWorker, open_stream
from grmpipe.models.types import Message
from grmpipe.types import Prompt

AT_LIMIT = Ended(signal=signal.SIGKILL, exit_code=0, cpu_s=0.1, limit="256 MB of memory", output="")


def test_the_report_of_a_supervisor_that_has_gone_outlives_a_word_to_it(tmp_path: Path) -> None:
    async def told() -> Ended | None:
        (env, env_there), (run, run_there) = socket.socketpair(), socket.socketpair()
        worker = ProcessWorker(await open_stream(env), await open_stream(run), run, tmp_path / "worker")
        (tmp_path / "worker").mkdir()
        run_there.sendall(frame(AT_LIMIT))
        run_there.close()
        env_there.close()
        worker.kill()
        ended = await worker.wait_ended()
        worker.release()
        return ended

    assert asyncio.run(told()) == AT_LIMIT


class EndsByItself:
    """A worker that dies at its first step, and tells its limit a little later unless it is killed before."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._pair, self._there = ours, theirs
        self.killed = False

    async def open(self) -> EndsByItself:
        self.reader, self.writer = await open_stream(self._pair)
        self._there.sendall(frame(Opened(opening=Opening(messages=(Message(role="user", content="?"),)))))
        self._there.sendall(frame(Began()))
        self._there.shutdown(socket.SHUT_WR)
        return self

    async def wait_ended(self) -> Ended | None:
        await asyncio.sleep(0.02)
        return None if self.killed else AT_LIMIT

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.killed = True

    def release(self) -> None:
        self.writer.transport.abort()
        self._there.close()


async def opened(worker: EndsByItself, counts: OpenedEnvs) -> HostedEnv:
    limits = StageLimits(boot_s=5.0, step_s=5.0, close_s=1.0, max_observation_chars=100)
    env = HostedEnv(worker.open, limits=limits, counts=counts, taken=set())
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
    await env.open(Episode(prompt=prompt, group_id="g", sibling=0, attempt=0, seed=0))
    return env


class ReportsOnce(EndsByItself):
    """A worker whose report comes by a stream that two can't read."""

    is_read = False

    async def wait_ended(self) -> Ended | None:
        assert not self.is_read, "two wait for one report"
        self.is_read = True
        return await super().wait_ended()


def test_a_run_that_stops_may_kill_a_worker_while_its_episode_closes_it() -> None:
    async def counted() -> OpenedEnvs:
        env = await opened(ReportsOnce(), counts := OpenedEnvs())
        await asyncio.gather(env.close(), env.kill())
        return counts

    assert asyncio.run(counted()) == OpenedEnvs(opened=1, killed=1)


def test_a_worker_that_ends_by_itself_tells_its_limit_before_it_is_killed() -> None:
    async def faults() -> tuple[str, ...]:
        env = await opened(EndsByItself(), OpenedEnvs())
        return tuple((await env.step(Action(text="x"))).faults)

    assert asyncio.run(faults()) == ("limit",)


def test_a_fault_of_an_environment_keeps_the_trace_of_its_process_as_its_cause() -> None:
    fault = rebuild_fault(BlamedEnv(detail="it broke", cause="broken", trace="Traceback .."))
    assert isinstance(fault, EnvFault) and "Traceback .." in str(fault.__cause__)
    assert rebuild_fault(BlamedEnv(detail="it broke", cause="broken")).__cause__ is None
