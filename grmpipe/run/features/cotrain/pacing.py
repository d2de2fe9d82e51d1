"""Keeps the steps of two learners, the policy's and the GRM's, in pace. Knows neither."""

import asyncio
import math


class StepPacer:
    """The pace of two learners. The GRM makes `warmup_steps` alone; then `grm_steps_per_policy_step` of its steps
    belong to each step of the policy.

    While the policy makes its step v + 1, the GRM may make the steps that belong to it; the policy waits for those that
    belong to v. So they overlap, and neither runs ahead of the other.
    """

    def __init__(self, *, warmup_steps: int, grm_steps_per_policy_step: float) -> None:
        self.policy_version = 0
        self.grm_version = 0
        self._warmup_steps = warmup_steps
        self._rate = grm_steps_per_policy_step
        self._skipped = 0
        self._moved = asyncio.Event()

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over, so that the GRM may judge for the policy."""
        return self.grm_version >= self._warmup_steps

    @property
    def policy_may_step(self) -> bool:
        """Whether the GRM has made the steps that the policy's next one waits for."""
        return self.grm_version + self._skipped >= self.grm_steps_with(self.policy_version)

    def grm_steps_with(self, policy_version: int) -> int:
        """The number of GRM steps that belong to the first `policy_version` steps of the policy."""
        return self._warmup_steps + math.floor(self._rate * policy_version + 1e-9)

    def skip_due(self) -> None:
        """Let the policy go on without the steps that are due: the GRM had nothing to learn from. They aren't made up
        for.
        """
        self._skipped = max(self._skipped, self.grm_steps_with(self.policy_version) - self.grm_version)

    def policy_stepped(self, version: int) -> None:
        self.policy_version = version
        self._moved.set()

    def grm_stepped(self, version: int) -> None:
        self.grm_version = version
        self._moved.set()

    async def until_policy_may_step(self) -> None:
        while not self.policy_may_step:
            await self._until_moved()

    async def until_grm_may_step(self) -> None:
        while self.grm_version + self._skipped >= self.grm_steps_with(self.policy_version + 1):
            await self._until_moved()

    async def until_warm(self) -> None:
        while not self.is_warm:
            await self._until_moved()

    async def _until_moved(self) -> None:
        """Wait for a step of either learner. All waiters check their condition again."""
        moved = self._moved
        await moved.wait()
        if self._moved is moved:
            self._moved = asyncio.Event()
