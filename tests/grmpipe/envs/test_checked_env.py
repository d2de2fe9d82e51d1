"""The door of environments: whatever a user's class raises or returns has an owner, a line and a cause."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import numpy as np
import pytest

from grmpipe.envs.checked_env import CheckedEnv
from grmpipe.envs.env import MAX_SAVED, Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.fault_owner import FaultRules
from grmpipe.models.types import Message, ToolSpec
from grmpipe.types import Prompt

EPISODE = Episode(prompt=Prompt(prompt_id="p", messages=(Message(role="user", content="?"),)))
HERE = r"test_checked_env\.py:\d+"


class Users:
    """Opens, and does in a step what it is given."""

    def __init__(self, step: Callable[[], object], opening: Callable[[], object] | None = None) -> None:
        self._step, self._opening = step, opening

    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=episode.prompt.messages) if self._opening is None else self._opening()  # type: ignore[return-value]

    async def step(self, action: Action) -> Observation:
        return self._step()  # type: ignore[return-value]

    async def close(self) -> None:
        """It holds nothing."""


def raises(error: BaseException) -> Callable[[], object]:
    def go() -> object:
        raise error

    return go


def stepped(step: Callable[[], object], rules: FaultRules | None = None) -> Observation:
    async def go() -> Observation:
        env = CheckedEnv(lambda: Users(step), rules or FaultRules())
        await env.open(EPISODE)
        return await env.step(Action(text=""))

    return asyncio.run(go())


def opened(opening: Callable[[], object]) -> Opening:
    return asyncio.run(CheckedEnv(lambda: Users(lambda: None, opening)).open(EPISODE))


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit("x"), KeyboardInterrupt("x"), asyncio.CancelledError("x")])
def test_error_of_a_step_names_its_function_and_line(error: BaseException) -> None:
    with pytest.raises(EnvFault) as fault:
        stepped(raises(error))
    said = rf"Users\.step \(.*{HERE}\) raised {type(error).__name__}: '?x'? \(.*{HERE}\)$"
    assert re.search(said, str(fault.value)) and fault.value.cause == "broken"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            Observation(done=True, rewards={"solved": None}),
            "the reward 'solved' = None, and it must be a finite number",
        ),  # type: ignore[dict-item]
        (Observation(done=True, rewards=1.0), r"rewards = 1\.0; return numbers by name, as {\"solved\": 1\.0}"),  # type: ignore[arg-type]
        (Observation(messages=None), "messages = None, and it must be a list of Message"),  # type: ignore[arg-type]
        (Observation(done=True, saved="state"), "saved = 'state', and it must be bytes"),  # type: ignore[arg-type]
        (None, "None, and must return an Observation"),
    ],
)
def test_a_value_that_can_not_be_used_names_the_function_and_what_to_return(answer: object, said: str) -> None:
    with pytest.raises(EnvFault, match=rf"Users\.step \(.*{HERE}\) returned {said}") as fault:
        stepped(lambda: answer)
    assert fault.value.cause == "protocol"


@pytest.mark.parametrize(
    ("opening", "said"),
    [
        (None, "None, and must return an Opening"),
        (Opening(messages=EPISODE.prompt.messages, tools=["add"]), "'add' among tools, and each must be a ToolSpec"),  # type: ignore[list-item]
        (
            Opening(
                messages=EPISODE.prompt.messages,
                tools=[ToolSpec(name="add", description="", parameters={"a": np.zeros(1)})],
            ),
            "the tool add, whose parameters are no JSON Schema",
        ),
        (
            Opening(messages=EPISODE.prompt.messages, replayable="yes"),  # type: ignore[arg-type]
            "replayable = 'yes', and it must be True or False",
        ),
    ],
)
def test_an_opening_is_checked_in_the_same_way(opening: object, said: str) -> None:
    with pytest.raises(EnvFault, match=rf"Users\.open \(.*{HERE}\) returned {said}"):
        opened(lambda: opening)


def test_a_class_that_can_not_be_made_is_a_fault() -> None:
    def make() -> Users:
        raise KeyboardInterrupt

    with pytest.raises(EnvFault, match="raised KeyboardInterrupt"):
        asyncio.run(CheckedEnv(make).open(EPISODE))


def test_an_exception_that_is_the_policys_doing_ends_the_episode_but_not_before_its_first_turn() -> None:
    error = type("MaxTurnsExceeded", (Exception,), {"__module__": "agents.exceptions"})("10 turns")
    with pytest.raises(PolicyFault, match="10 turns") as fault:
        stepped(raises(error))
    assert (fault.value.kind, fault.value.ends) == ("MaxTurnsExceeded", True)
    with pytest.raises(EnvFault, match="MaxTurnsExceeded"):
        opened(raises(error))


def test_what_an_environment_saves_has_a_limit() -> None:
    assert stepped(lambda: Observation(done=True, saved=bytes(MAX_SAVED))).saved == bytes(MAX_SAVED)
    with pytest.raises(EnvFault, match=r"saved 1,048,577 bytes, and may save 1,048,576; keep the state elsewhere"):
        stepped(lambda: Observation(done=True, saved=bytes(MAX_SAVED + 1)))
