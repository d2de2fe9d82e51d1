"""An environment whose stages end in time, whose failures are sorted and whose answers are checked. Plays nothing."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from grmpipe.envs.env import Action, Env, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.types import EnvCause
from models.types import Message
from scheduler.event_loop import TimeIsUp, within
from scheduler.events import EventSink, NoEvents

log = logging.getLogger(__name__)

T = TypeVar("T")
LANE = "env"  # of the timeline
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Limits on the stages of an environment, in seconds, and on the length of a message, in characters."""

    boot_s: float
    step_s: float
    close_s: float
    max_observation_chars: int


class LimitedEnv:
    """An environment around another. Raises only PolicyFault and EnvFault; closes the other exactly once."""

    def __init__(self, env: Env, limits: StageLimits, events: EventSink | None = None, lane: str = LANE) -> None:
        self._env = env
        self._lane = lane
        self._limits = limits
        self._events = events or NoEvents()
        self._name = ""  # of the episode, in events

    async def open(self, episode: Episode) -> Opening:
        self._name = f"{episode.group_id}/{episode.sibling}"
        with self._span("open", attempt=episode.attempt):
            try:
                opening = await in_time(self._env.open(episode), self._limits.boot_s, "boot_s", "open", "boot")
            except PolicyFault as fault:
                raise EnvFault(f"open raised a PolicyFault, and the policy has done nothing so far: {fault}") from fault
        check(isinstance(opening, Opening), f"open returned {type(opening).__name__}, and must return an Opening")
        check(bool(opening.messages), "open returned no messages")
        check_messages(opening.messages)
        return opening

    async def step(self, action: Action) -> Observation:
        with self._span("step", turn=action.turn):
            observation = await in_time(self._env.step(action), self._limits.step_s, "step_s", "step", "timeout")
        check(
            isinstance(observation, Observation),
            f"step returned {type(observation).__name__}, and must return an Observation",
        )
        check_messages(observation.messages)
        for name, reward in observation.rewards.items():
            check(math.isfinite(reward), f"step returned the reward {name} = {reward}, and it must be finite")
        longest = self._limits.max_observation_chars
        return replace(observation, messages=tuple(shortened(message, longest) for message in observation.messages))

    async def close(self) -> None:
        """Close in time, also while the episode is being cancelled. A failure is logged: the episode is over anyway."""
        closing = asyncio.ensure_future(self._env.close())
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


async def in_time(doing: Awaitable[T], limit_s: float, key: str, stage: str, late: EnvCause) -> T:
    """The result of a stage. Raises PolicyFault as it is, and EnvFault for everything else."""
    try:
        return await within(limit_s, doing, f"{LANE}.{stage}")
    except (PolicyFault, EnvFault):
        raise
    except TimeIsUp:
        raise EnvFault(f"{stage} took longer than env.{key} = {limit_s:g} s", late) from None
    except Exception as error:  # the user's code may raise anything
        raise EnvFault(f"{stage} raised {type(error).__name__}: {error}", "broken") from error


def check(holds: bool, detail: str) -> None:
    if not holds:
        raise EnvFault(detail, "protocol")


def check_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        check(isinstance(message, Message), f"a message is a {type(message).__name__}, and must be a Message")
        check(message.role in ROLES, f"a message has the role {message.role!r}; known: {', '.join(ROLES)}")
        check(isinstance(message.content, str), f"a message's content is a {type(message.content).__name__}, no text")


def shortened(message: Message, max_chars: int) -> Message:
    """The message without the middle of a content that is too long."""
    content = message.content
    if len(content) <= max_chars:
        return message
    begin = (max_chars + 1) // 2
    end = len(content) - (max_chars - begin)
    return replace(message, content=f"{content[:begin]}\n[{end - begin} characters left out]\n{content[end:]}")
