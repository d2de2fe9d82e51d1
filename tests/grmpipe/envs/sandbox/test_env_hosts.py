"""Hosts of environments, with members in this process that can be killed: shares, deaths, counts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from grmpipe.config.env import EnvConfig
from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.play import RolloutRequest
from grmpipe.envs.retry_episode import EpisodeFailed, with_attempts
from grmpipe.envs.sandbox import env_host
from grmpipe.envs.sandbox.env_hosts import EnvHosts, HostsLost
from grmpipe.envs.sandbox.host_member import HostMember, HostSetup
from grmpipe.models.types import Message, ToolSpec
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.processes.wire_types import Dialect
from grmpipe.scheduler.slots.engine_replacement import RETRY_AFTER_S, HealthConfig
from grmpipe.types import Prompt, Rollout

MESSAGES = (Message(role="user", content="2 + 2?"),)
HEALTH = HealthConfig()
EPISODE = Episode(prompt=Prompt(prompt_id="p", messages=MESSAGES, info={"answer": 4}), group_id="g", seed=7)
CLOSED: list[object] = []


class MaxTurnsExceeded(Exception):
    """As openai-agents raises it."""


MaxTurnsExceeded.__module__ = "agents.exceptions"


class Obedient:
    """Does what the policy says."""

    async def open(self, episode: Episode) -> Opening:
        self.episode = episode
        if episode.group_id == "slow":
            await asyncio.sleep(60)
        return Opening(messages=episode.prompt.messages, tools=[ToolSpec(name="t", description="", parameters={})])

    async def step(self, action: Action) -> Observation:
        if action.text == "hang":
            await asyncio.sleep(60)
        if action.text == "break":
            raise KeyError("its own error")
        if action.text == "leave":
            sys.exit(3)
        if action.text == "turns":
            raise MaxTurnsExceeded("Max turns (10) exceeded")
        if action.text == "blame":
            raise PolicyFault("say please", "manners")
        reward = np.float32(self.episode.seed)
        return Observation(done=True, rewards={"seed": reward}, state_key=action.text)  # type: ignore[dict-item]

    async def close(self) -> None:
        CLOSED.append(self)


CONFIG = EnvConfig(kind="custom", target=f"{__name__}.Obedient", step_s=5, boot_s=5, close_s=1)


class Killable:
    """A group of hosts in this process; a killed one answers no more, as a process that is gone."""

    def __init__(self, config: EnvConfig, folder: Path, size: int) -> None:
        self.setup = HostSetup(config=config, run_dir=str(folder))
        self.size = size
        self.dead = [asyncio.Event() for _ in range(size)]
        self.members = [self._made(rank) for rank in range(size)]
        self.no_restarts = False

    def _made(self, rank: int) -> HostMember:
        return HostMember(self.setup, rank, self.size, None)

    async def call(self, rank: int, method: str, *args: object) -> object:
        dead = self.dead[rank]
        asking = asyncio.ensure_future(getattr(self.members[rank], method)(*args))
        dying = asyncio.ensure_future(dead.wait())
        try:
            await asyncio.wait({asking, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dead.is_set():
                raise ActorDied(f"env-{rank}", "it was killed")
            return asking.result()
        finally:
            asking.cancel()
            dying.cancel()

    async def call_all(self, method: str, *args: object) -> list[object]:
        return [await self.call(rank, method, *args) for rank in range(self.size)]

    async def call_each(self, method: str, args_by_rank: object) -> list[object]:
        raise AssertionError

    async def close(self) -> None:
        raise AssertionError

    async def restart(self, rank: int) -> None:
        self.dead[rank].set()
        await asyncio.sleep(0)
        if self.no_restarts:
            raise TimeoutError("no machine has room")
        self.dead[rank] = asyncio.Event()
        self.members[rank] = self._made(rank)


@asynccontextmanager
async def started(
    folder: Path, config: EnvConfig = CONFIG, size: int = 2, limits: HealthConfig = HEALTH
) -> AsyncIterator[tuple[EnvHosts, Killable]]:
    group = Killable(config, folder, size)
    hosts = EnvHosts("env", group, restart=group.restart, config=config, health=limits)
    await hosts.start()
    try:
        yield hosts, group
    finally:
        await hosts.close()
        counts = hosts.counts
        assert counts.opened == counts.closed + counts.killed, counts


def shares(hosts: EnvHosts) -> list[int]:
    return [host.num_envs for host in hosts._hosts]


def test_each_episode_goes_to_the_host_with_the_most_free_seats(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, size=3) as (hosts, _):
            envs = []
            for sibling in range(6):
                envs.append(hosts.env())
                await envs[-1].open(replace(EPISODE, sibling=sibling))
            assert shares(hosts) == [2, 2, 2]
            await envs[1].close()
            await envs[4].close()
            assert shares(hosts) == [2, 0, 2]
            for _ in range(2):
                await (hosts.env()).open(EPISODE)
            assert shares(hosts) == [2, 2, 2]

    asyncio.run(main())


def test_messages_and_errors_of_a_hosted_environment_arrive_unchanged(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path) as (hosts, _):
            env = hosts.env()
            opening = await env.open(EPISODE)
            assert (tuple(opening.messages), [tool.name for tool in opening.tools]) == (MESSAGES, ["t"])
            with pytest.raises(PolicyFault, match="^say please$") as blamed:
                await env.step(Action(text="blame"))
            assert blamed.value.kind == "manners"
            with pytest.raises(PolicyFault, match="Max turns") as limit:
                await env.step(Action(text="turns"))
            assert (limit.value.kind, limit.value.ends) == ("MaxTurnsExceeded", True)
            with pytest.raises(EnvFault, match=r"Obedient\.step .* raised SystemExit: 3"):
                await env.step(Action(text="leave"))
            with pytest.raises(
                EnvFault, match=r"Obedient\.step .* raised KeyError: 'its own error' \(.*:\d+\)"
            ) as broken:
                await env.step(Action(text="break"))
            assert broken.value.cause == "broken" and "in step" in str(broken.value.__cause__), "the place is shown"
            assert (await env.step(Action(text="go"))).rewards == {"seed": 7.0}
            before = len(CLOSED)
            await env.close()
            assert len(CLOSED) == before + 1

    asyncio.run(main())


def test_a_host_that_dies_fails_only_its_own_episodes_and_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path) as (hosts, group):
            await (here := hosts.env()).open(EPISODE)
            await (there := hosts.env()).open(EPISODE)
            hanging = asyncio.create_task(here.step(Action(text="hang")))
            await asyncio.sleep(0)
            group.dead[0].set()
            with pytest.raises(EnvFault, match="the host env-0 of its environment died: it was killed") as fault:
                await hanging
            assert fault.value.cause == "died"
            with pytest.raises(EnvFault, match="env-0"):
                await here.step(Action(text="go"))
            await here.close()
            assert (await there.step(Action(text="go"))).done
            await there.close()
            assert (hosts.counts.opened, hosts.counts.closed, hosts.counts.killed) == (2, 1, 1)
            while hosts.num_replaced == 0:
                await asyncio.sleep(0)
            again = hosts.env()
            await again.open(EPISODE)
            assert shares(hosts) == [1, 0]
            await again.close()

    asyncio.run(main())


def test_an_episode_is_played_again_on_another_host(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path) as (hosts, group):

            async def play(request: RolloutRequest, prompt: Prompt, on_first_token: object) -> Rollout:
                env = hosts.env()
                try:
                    await env.open(replace(EPISODE, attempt=request.attempt))
                    if request.attempt == 0:
                        group.dead[0].set()
                    observation = await env.step(Action(text="go"))
                    assert observation.done
                    return Rollout(group_id="g", sibling=0, turns=(), status="finished")
                finally:
                    await env.close()

            played = with_attempts(play, attempts=2, retry_s=0)
            rollout = await played(RolloutRequest(group_id="g", sibling=0, seed=1), EPISODE.prompt, lambda: None)
            assert [failure.cause for failure in rollout.env_failures] == ["died"]

    asyncio.run(main())


def test_a_host_that_keeps_no_limit_counts_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped, or on a machine that can't be reached."""
    monkeypatch.setattr(env_host, "ENDING_S", 0.25)

    async def main() -> None:
        async with started(tmp_path, replace(CONFIG, step_s=0.01)) as (hosts, group):
            env = hosts.env()
            await env.open(EPISODE)
            stuck = asyncio.Event()
            group.members[0].serve = lambda *_: stuck.wait()  # type: ignore[method-assign, assignment]
            old = group.members[0]
            with pytest.raises(EnvFault, match="it did not answer within 1.01 s"):
                await env.step(Action(text="go"))
            while hosts.num_replaced == 0:
                await asyncio.sleep(0)
            assert group.members[0] is not old
            await env.close()
            assert hosts.counts.killed == 1

    asyncio.run(main())


def test_an_environment_that_keeps_no_limit_costs_its_host_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, replace(CONFIG, step_s=0.02)) as (hosts, _):
            env = hosts.env()
            await env.open(EPISODE)
            with pytest.raises(EnvFault, match=r"step took longer than env\.step_s = 0\.02 s") as fault:
                await env.step(Action(text="hang"))
            assert fault.value.cause == "timeout"
            await env.close()
            assert hosts.counts.closed == 1

    asyncio.run(main())


def test_an_episode_that_is_cancelled_while_it_boots_is_closed_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path) as (hosts, group):
            env = hosts.env()
            opening = asyncio.create_task(env.open(replace(EPISODE, group_id="slow")))
            while not group.members[0]._envs:
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait({opening})
            before = len(CLOSED)
            await env.close()
            assert len(CLOSED) == before + 1 and not group.members[0]._envs
            assert (hosts.counts.opened, hosts.counts.closed) == (1, 1)

    asyncio.run(main())


def test_while_its_only_host_starts_again_an_episode_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, size=1) as (hosts, group):
            env = hosts.env()
            await env.open(EPISODE)
            group.dead[0].set()
            with pytest.raises(EnvFault):
                await env.step(Action(text="go"))
            later = hosts.env()
            await later.open(EPISODE)
            assert (await later.step(Action(text="go"))).done and hosts.num_replaced == 1
            await later.close()

    asyncio.run(main())


def test_when_the_last_host_is_lost_the_run_ends_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grmpipe.envs.sandbox.env_hosts.RETRY_AFTER_S", 0.0)
    assert RETRY_AFTER_S > 0

    async def main() -> None:
        async with started(tmp_path, size=1, limits=HealthConfig(max_replacements=2)) as (hosts, group):
            group.no_restarts = True
            env = hosts.env()
            await env.open(EPISODE)
            group.dead[0].set()

            async def play(*_: object) -> Rollout:
                await env.step(Action(text="go"))
                raise AssertionError

            with pytest.raises(EpisodeFailed, match="died"):
                await with_attempts(play, attempts=1, retry_s=0)(
                    RolloutRequest(group_id="g", sibling=0, seed=1), EPISODE.prompt, lambda: None
                )
            waiting = hosts.env()
            with pytest.raises(EnvFault, match="env-0 of its environment died"):
                await waiting.open(EPISODE)
            with pytest.raises(HostsLost, match=r"env-0 died: it was killed"):
                hosts.env()

    asyncio.run(main())


def test_a_host_that_cant_have_the_environments_names_its_machine(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path, replace(CONFIG, target="grmpipe.envs.env.EnvFault")):
            raise AssertionError

    with pytest.raises(ValueError, match=r"^target: .* is no env: .* \(on the machine \S+\)$"):
        asyncio.run(main())


def test_calls_of_a_host_go_by_the_socket_of_its_machine() -> None:
    assert {"start", "serve", "stop"} <= Dialect.of(HostMember).calls.keys()
