"""Environments in the run's own process: limits of time only, and faults on purpose. Isolates nothing."""

from __future__ import annotations

import asyncio

from grmpipe.envs.env import Action, Env, EnvFault, Episode, Observation, Opening
from grmpipe.envs.env_factory import MakeEnv
from grmpipe.envs.isolation.fault_plan import OPENING, FaultMoment, fault_moment
from grmpipe.envs.isolation.stages import FaultInjection, SeatCounts, StageLimits


class InprocessHost:
    """Constructs environments right here."""

    def __init__(self, make: MakeEnv, limits: StageLimits, faults: FaultInjection | None) -> None:
        self.seats = SeatCounts()
        self._make = make
        self._limits = limits
        self._faults = faults

    def env(self) -> Env:
        return BoundedEnv(self._make(), self._limits, self.seats, self._faults)


class BoundedEnv:
    """An environment with time limits, which end its coroutines at their next `await`: blocking code has none.

    A step beyond its limit is the environment's fault here: nothing tells whose program ran.
    """

    def __init__(self, env: Env, limits: StageLimits, seats: SeatCounts, faults: FaultInjection | None = None) -> None:
        self._env = env
        self._limits = limits
        self._seats = seats
        self._injection = faults
        self._moment: FaultMoment | None = None

    async def open(self, episode: Episode) -> Opening:
        self._moment = fault_moment(self._injection, episode)
        self._seats.opened += 1
        self._strike(OPENING)
        try:
            async with asyncio.timeout(self._limits.boot_s):
                return await self._env.open(episode)
        except TimeoutError as error:
            raise EnvFault(f"open did not return in {self._limits.boot_s:g} s", "timeout") from error

    async def step(self, action: Action) -> Observation:
        self._strike(action.turn)
        try:
            async with asyncio.timeout(self._limits.step_s):
                observation = await self._env.step(action)
        except TimeoutError as error:
            raise EnvFault(f"step did not return in {self._limits.step_s:g} s", "timeout") from error
        self._strike(action.turn, is_done=observation.done)
        return observation

    async def close(self) -> None:
        try:
            async with asyncio.timeout(self._limits.close_s):
                await self._env.close()
        except TimeoutError:
            self._seats.killed += 1
        except BaseException:
            self._seats.killed += 1
            raise
        else:
            self._seats.closed += 1

    def _strike(self, turn: int, *, is_done: bool = False) -> None:
        """End the episode on purpose, if its moment has come."""
        if self._moment is not None and self._moment.has_come(turn, is_done=is_done):
            raise EnvFault("ended on purpose (env.inject_faults)", "died")
