"""Plays an episode again, in a new environment, after the environment failed. Never repeats a single step."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from grmpipe.envs.env import EnvFault
from grmpipe.envs.play import Play, RolloutRequest, keep_nothing
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import Generates, KeepsTrajectories
from grmpipe.types import EnvCause, Failed, Prompt, Rollout

log = logging.getLogger(__name__)
RETRY_S = 0.5  # wait before the second episode; twice as long before each further one


class EpisodeFailed(Exception):
    """The environment failed in every attempt: there is no rollout. `failures`: one per attempt."""

    def __init__(self, failures: tuple[Failed, ...]) -> None:
        super().__init__(f"{failures[-1].cause}: {failures[-1].detail}")
        self.failures = failures

    @property
    def failed(self) -> Failed:
        return self.failures[-1]


class ActingEngine(Generates, KeepsTrajectories, Protocol):
    """The policy's engines, or who acts in their place."""


def with_attempts(play: Play, *, attempts: int, retry_s: float = RETRY_S) -> Play:
    """A play of at most `attempts` episodes, each with its own seed. Raises EpisodeFailed instead of EnvFault."""

    seen: set[EnvCause] = set()

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        failures: list[Failed] = []
        while True:
            try:
                rollout = await play(next_attempt(request, len(failures)), prompt, on_first_token)
                return replace(rollout, env_failures=tuple(failures)) if failures else rollout
            except EnvFault as fault:
                failures.append(Failed(stage="env", cause=fault.cause, attempts=len(failures) + 1, detail=str(fault)))
                # The first of each cause is for the console, the others are for run.log.
                log.log(
                    logging.INFO if fault.cause in seen else logging.WARNING,
                    "episode %s/%d, attempt %d of %d: the environment failed (%s): %s",
                    request.group_id, request.sibling, len(failures), attempts, fault.cause, fault,
                    exc_info=fault.__cause__ if fault.cause == "broken" else None,
                )  # fmt: skip
                seen.add(fault.cause)
            if len(failures) == attempts:
                raise EpisodeFailed(tuple(failures))
            await asyncio.sleep(retry_s * 2 ** (len(failures) - 1))

    return played


def next_attempt(request: RolloutRequest, attempt: int) -> RolloutRequest:
    """The request of an attempt, from 0. A further one draws other tokens, under other names."""
    if attempt == 0:
        return request
    seed = derive_seed(request.seed, f"attempt {attempt}")
    return replace(request, attempt=attempt, seed=seed, begun=None, on_resumable=keep_nothing)


def free_after(play: Play, engines: KeepsTrajectories) -> Play:
    """A play at whose end the engines free what they keep of the episode for further turns."""

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        try:
            return await play(request, prompt, on_first_token)
        finally:
            engines.end_trajectory(request.trajectory_id)

    return played
