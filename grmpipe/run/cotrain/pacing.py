"""Who of two learners may step next: the policy's and the GRM's keep in step. Knows neither."""

from __future__ import annotations

import asyncio
import math


class StepPacer:
    """The GRM has `warmup_steps` alone; then `grm_steps_per_policy_step` of its steps go with each step of the policy.

    While the policy makes its step v + 1, the GRM may make those that go with it; the policy waits for the steps that
    went with v. So they overlap, and neither gets away from the other.
    """

    def __init__(self, *, warmup_steps: int, grm_steps_per_policy_step: float) -> None:
        self.policy_version = 0
        self.grm_version = 0
        self._warmup_steps = warmup_steps
        self._rate = grm_steps_per_policy_step
        self._moved = asyncio.Event()

    @property
    def is_warm(self) -> bool:
        """Whether the policy may hear the GRM at all."""
        return self.grm_version >= self._warmup_steps

    def grm_steps_with(self, policy_version: int) -> int:
        """Steps of the GRM that have gone with so many of the policy."""
        return self._warmup_steps + math.floor(self._rate * policy_version + 1e-9)

    def policy_stepped(self, version: int) -> None:
        self.policy_version = version
        self._moved.set()

    def grm_stepped(self, version: int) -> None:
        self.grm_version = version
        self._moved.set()

    async def until_policy_may_step(self) -> None:
        while self.grm_version < self.grm_steps_with(self.policy_version):
            await self._until_moved()

    async def until_grm_may_step(self) -> None:
        while self.grm_version >= self.grm_steps_with(self.policy_version + 1):
            await self._until_moved()

    async def until_warm(self) -> None:
        while not self.is_warm:
            await self._until_moved()

    async def _until_moved(self) -> None:
        """Several wait: each looks again after every move."""
        moved = self._moved
        await moved.wait()
        if self._moved is moved:
            self._moved = asyncio.Event()
