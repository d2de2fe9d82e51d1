"""An environment whose stages end in time, whose failures are sorted and whose answers are checked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from grmpipe.config.env import EnvConfig
from grmpipe.config.keys.user_code import call_guarded, shorten
from grmpipe.envs.checked_env import NO_RULES, check, check_observation, check_opening
from grmpipe.envs.env import Action, Env, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.fault_owner import raise_faults, readable
from grmpipe.models.types import Message
from grmpipe.scheduler.event_loop import TimeIsUp, within
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.types import EnvCause

log = logging.getLogger(__name__)

T = TypeVar("T")
LANE = "env"  # in the timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Limits on the stages of an environment, in seconds, and on the length of a message, in characters."""

    boot_s: float
    step_s: float
    close_s: float
    max_observation_chars: int

    @staticmethod
    def of(config: EnvConfig) -> StageLimits:
        return StageLimits(
            boot_s=config.boot_s,
            step_s=config.step_s,
            close_s=config.close_s,
            max_observation_chars=config.max_observation_chars,
        )


class LimitedEnv:
    """An environment around another. Raises only PolicyFault and EnvFault; closes the other exactly once."""

    def __init__(self, env: Env, limits: StageLimits, events: EventSink | None = None, lane: str = LANE) -> None:
        self._env = env
        self._lane = lane
        self._limits = limits
        self._events = events or NoEvents()
        self._name = ""  # the episode's, in events

    async def open(self, episode: Episode) -> Opening:
        self._name = f"{episode.group_id}/{episode.sibling}"
        with self._span("open", attempt=episode.attempt):
            opening = await in_time(lambda: self._env.open(episode), self._limits.boot_s, "boot_s", "open", "boot")
        opening = check_opening(opening)
        check(bool(opening.messages), "open returned no messages, and the policy needs one to begin with")
        return opening

    async def step(self, action: Action) -> Observation:
        longest = self._limits.max_observation_chars
        with self._span("step", turn=action.turn):
            try:
                observation = await in_time(lambda: self._env.step(action), self._limits.step_s, "step_s", "step")
            except PolicyFault as fault:
                raise readable(fault, longest) from fault.__cause__
        observation = check_observation(observation)
        return replace(observation, messages=tuple(short(message, longest) for message in observation.messages))

    async def close(self) -> None:
        """Close in time, also while the episode is being cancelled. A failure is logged: the episode is over anyway."""
        closing = asyncio.ensure_future(close_env(self._env))
        try:
            with self._span("close"):
                async with asyncio.timeout(self._limits.close_s):
                    await asyncio.shield(closing)
        except TimeoutError:
            closing.cancel()
            log.warning("an environment wasn't closed within env.close_s = %g s", self._limits.close_s)
        except Exception as error:  # the user's code may raise anything
            log.warning("close of an environment failed: %s: %s", type(error).__name__, error)

    @contextmanager
    def _span(self, stage: str, **args: int) -> Iterator[None]:
        """A span of the timeline, however the stage ends."""
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        try:
            yield
        finally:
            self._events.span(self._lane, stage, begun_s, clock(), episode=self._name, **args)


async def close_env(env: Env) -> None:
    with call_guarded("close"):  # in a task of its own, which passes on what would end the process
        await env.close()


async def in_time(
    ask: Callable[[], Awaitable[T]], limit_s: float, key: str, stage: str, late: EnvCause = "timeout"
) -> T:
    """The result of a stage. Raises PolicyFault or EnvFault for whatever it raises, but a cancellation from outside."""
    with raise_faults(stage, NO_RULES, has_acted=stage != "open"):
        try:
            return await within(limit_s, ask(), f"{LANE}.{stage}")
        except TimeIsUp:
            raise EnvFault(f"{stage} took longer than env.{key} = {limit_s:g} s", late) from None


def short(message: Message, max_chars: int) -> Message:
    """The message without the middle of a content that is too long."""
    content = shorten(message.content, max_chars)
    return message if content is message.content else replace(message, content=content)
