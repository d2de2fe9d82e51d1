"""Limits and failures of an environment: what is shown to the policy, what is not, and that it is closed once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from grmpipe.types import Prompt
from models.types import Message

EPISODE = Episode(prompt=Prompt(prompt_id="p", messages=(Message(role="user", content="?"),)))
REPLY = Observation(messages=[Message(role="tool", content="41")])


async def nothing() -> None:
    pass


async def for_ever() -> None:
    await asyncio.sleep(3600)


class Scripted:
    """Does in each stage what it is given."""

    def __init__(
        self,
        opening: object = None,
        observation: object = REPLY,
        during: Callable[[], Awaitable[None]] = nothing,
        closing: Callable[[], Awaitable[None]] = nothing,
    ) -> None:
        self._opening = Opening(messages=EPISODE.prompt.messages) if opening is None else opening
        self._observation, self._during, self._closing = observation, during, closing
        self.num_closed = 0

    async def open(self, episode: Episode) -> Opening:
        await self._during()
        return self._opening  # type: ignore[return-value]

    async def step(self, action: Action) -> Observation:
        await self._during()
        return self._observation  # type: ignore[return-value]

    async def close(self) -> None:
        self.num_closed += 1
        await self._closing()


def limited(env: Scripted, max_observation_chars: int = 100) -> LimitedEnv:
    return LimitedEnv(
        env, StageLimits(boot_s=0.02, step_s=0.02, close_s=0.02, max_observation_chars=max_observation_chars)
    )


def raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def go() -> None:
        raise error

    return go


def opened(env: Scripted) -> Opening:
    return asyncio.run(limited(env).open(EPISODE))


def stepped(env: Scripted) -> Observation:
    return asyncio.run(limited(env).step(Action(text="")))


@pytest.mark.parametrize("stage", [opened, stepped])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (EnvFault("no seat", "capacity"), "capacity"),
        (KeyError("x"), "broken"),
        (TimeoutError("of the user's own"), "broken"),
        (RecursionError(), "broken"),
    ],
)
def test_what_an_environment_raises_is_its_own_fault_with_a_cause(
    stage: Callable[[Scripted], object], error: Exception, cause: str
) -> None:
    with pytest.raises(EnvFault) as fault:
        stage(Scripted(during=raising(error)))
    assert fault.value.cause == cause


def test_a_fault_of_the_policy_passes_as_it_is_but_for_one_before_its_first_turn() -> None:
    env = Scripted(during=raising(PolicyFault("no such file")))
    with pytest.raises(PolicyFault, match="no such file"):
        stepped(env)
    with pytest.raises(EnvFault, match="no such file"):
        opened(env)


@pytest.mark.parametrize(("stage", "cause", "key"), [(opened, "boot", "boot_s"), (stepped, "timeout", "step_s")])
def test_a_stage_that_takes_too_long_ends_with_the_key_of_its_limit(
    stage: Callable[[Scripted], object], cause: str, key: str
) -> None:
    with pytest.raises(EnvFault, match=rf"env\.{key} = 0\.02 s") as fault:
        stage(Scripted(during=for_ever))
    assert fault.value.cause == cause


@pytest.mark.parametrize(
    "answer",
    [
        None,
        Observation(messages=["a text"]),  # type: ignore[list-item]
        Observation(messages=[Message(role="robot", content="")]),
        Observation(messages=[Message(role="tool", content=7)]),  # type: ignore[arg-type]
        Observation(done=True, rewards={"answer": math.nan}),
        Observation(done=True, rewards={"answer": math.inf}),
    ],
)
def test_an_answer_that_is_none_is_a_broken_protocol(answer: object) -> None:
    with pytest.raises(EnvFault) as fault:
        stepped(Scripted(observation=answer))
    assert fault.value.cause == "protocol"


def test_an_opening_needs_messages() -> None:
    with pytest.raises(EnvFault, match="no messages"):
        opened(Scripted(opening=Opening(messages=())))


def test_the_middle_of_a_long_message_is_left_out_and_said_to_be() -> None:
    long = Observation(messages=[Message(role="tool", content="a" * 70 + "b" * 70), *REPLY.messages])
    env = limited(Scripted(observation=long), max_observation_chars=10)
    first, second = asyncio.run(env.step(Action(text=""))).messages
    assert first.content == "aaaaa\n[130 characters left out]\nbbbbb"
    assert second == REPLY.messages[0]


@pytest.mark.parametrize("closing", [for_ever, raising(OSError("gone"))])
def test_a_close_that_fails_or_hangs_ends_in_time_and_raises_nothing(closing: Callable[[], Awaitable[None]]) -> None:
    env = Scripted(closing=closing)
    asyncio.run(asyncio.wait_for(limited(env).close(), 1))
    assert env.num_closed == 1


def test_a_close_goes_on_although_its_caller_is_cancelled() -> None:
    async def go() -> bool:
        ended = asyncio.Event()

        async def slow() -> None:
            await asyncio.sleep(0.005)
            ended.set()

        closing = asyncio.create_task(limited(Scripted(closing=slow)).close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        await asyncio.wait_for(ended.wait(), 1)
        return True

    assert asyncio.run(go())
