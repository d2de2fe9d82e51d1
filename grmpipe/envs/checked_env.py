"""The door of environments: what a user's class raises gets an owner and a cause, what it returns is checked and made
plain.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec

from grmpipe.config.keys.user_code import call_guarded, describe_code, format_value, plain_text, to_number, to_scalar
from grmpipe.envs.env import MAX_SAVED, Action, Env, EnvFault, Episode, Observation, Opening
from grmpipe.envs.fault_owner import FaultRules, decide_fault, raise_faults
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.models.types import Message, ToolSpec

ROLES = ("system", "user", "assistant", "tool")
NO_RULES = FaultRules()
T = TypeVar("T")


class CheckedEnv:
    """An environment of the user's class, which `open` makes. Raises only PolicyFault and EnvFault.

    counts: get what becomes of it.
    """

    def __init__(self, make: Callable[[], Env], rules: FaultRules = NO_RULES, counts: OpenedEnvs | None = None) -> None:
        self._make = make
        self._rules = rules
        self._counts = counts or OpenedEnvs()
        self._is_open = False
        self._env: Env | None = None

    async def open(self, episode: Episode) -> Opening:
        self._counts.opened += 1
        self._is_open = True
        try:
            self._env = env = self._make()
        except BaseException as error:
            raise decide_fault(error, describe_code(self._make), self._rules, has_acted=False) from error
        owner = describe_code(env.open)
        with raise_faults(owner, self._rules, has_acted=False):
            opening = await env.open(episode)
        return check_opening(opening, owner)

    async def step(self, action: Action) -> Observation:
        env = self._env
        assert env is not None, "open comes first"
        owner = describe_code(env.step)
        with raise_faults(owner, self._rules, has_acted=True):
            observation = await env.step(action)
        return check_observation(observation, owner)

    async def close(self) -> None:
        """Raises UserCodeError."""
        is_closed = False
        try:
            if self._env is not None:
                with call_guarded(describe_code(self._env.close)):
                    await self._env.close()
            is_closed = True
        finally:
            self._counts.closed += self._is_open and is_closed
            self._counts.killed += self._is_open and not is_closed


def check_opening(opening: Opening, owner: str = "open") -> Opening:
    """The opening in plain values. Raises EnvFault (protocol), which names the owner."""
    check(isinstance(opening, Opening), f"{owner} returned {format_value(opening)}, and must return an Opening")
    messages = check_messages(opening.messages, owner)
    tools = check_tuple(opening.tools, ToolSpec, "tools", owner)
    for tool in tools:
        check_tool(tool, owner)
    replayable = to_scalar(opening.replayable)
    check(
        isinstance(replayable, bool),
        f"{owner} returned replayable = {format_value(replayable)}, and it must be True or False",
    )
    return Opening(
        messages=messages,
        tools=tools,
        state_key=text_in(opening.state_key, "state_key", owner),
        replayable=bool(replayable),
        saved=check_saved(opening.saved, owner),
    )


def check_observation(observation: Observation, owner: str = "step") -> Observation:
    """The observation in plain values. Raises EnvFault (protocol), which names the owner."""
    if not isinstance(observation, Observation):
        raise protocol(f"{owner} returned {format_value(observation)}, and must return an Observation")
    done = to_scalar(observation.done)
    check(isinstance(done, bool), f"{owner} returned done = {format_value(done)}, and it must be True or False")
    return Observation(
        messages=check_messages(observation.messages, owner),
        done=bool(done),
        rewards=check_rewards(observation.rewards, owner),
        state_key=text_in(observation.state_key, "state_key", owner),
        faults=tuple(
            text_in(fault, "a fault", owner) for fault in check_tuple(observation.faults, str, "faults", owner)
        ),
        saved=check_saved(observation.saved, owner),
    )


def check_saved(saved: object, owner: str) -> bytes:
    if not isinstance(saved, bytes):
        raise protocol(f"{owner} returned saved = {format_value(saved)}, and it must be bytes")
    if len(saved) > MAX_SAVED:
        raise protocol(f"{owner} saved {len(saved):,} bytes, and may save {MAX_SAVED:,}; keep the state elsewhere")
    return saved


def check_rewards(rewards: object, owner: str) -> dict[str, float]:
    if not isinstance(rewards, Mapping):
        raise protocol(
            f'{owner} returned rewards = {format_value(rewards)}; return numbers by name, as {{"solved": 1.0}}'
        )
    found = {}
    for name, reward in rewards.items():
        number = to_number(reward)
        if number is None:
            raise protocol(
                f"{owner} returned the reward {format_value(name)} = {format_value(reward)}, and it must be a "
                f"finite number; leave "
                "out a reward that isn't known"
            )
        found[text_in(name, "the name of a reward", owner)] = number
    return found


def check_messages(messages: object, owner: str) -> tuple[Message, ...]:
    return tuple(check_message(message, owner) for message in check_tuple(messages, Message, "messages", owner))


def check_message(message: Message, owner: str) -> Message:
    role = message.role
    known = isinstance(role, str) and role in ROLES
    check(known, f"{owner} returned a message with the role {format_value(role)}; known: {', '.join(ROLES)}")
    name, call_id = message.name, message.tool_call_id
    return replace(
        message,
        role=str(role),
        content=text_in(message.content, "a message's content", owner),
        name=text_in(name, "a message's name", owner),
        tool_call_id=text_in(call_id, "a message's tool_call_id", owner),
    )


def check_tool(tool: ToolSpec, owner: str) -> None:
    for part, text in (("name", tool.name), ("description", tool.description)):
        check(type(text) is str, f"{owner} returned a tool whose {part} is {format_value(text)}, and must be a text")
    try:
        msgspec.json.encode(tool.parameters)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise protocol(f"{owner} returned the tool {tool.name}, whose parameters are no JSON Schema: {error}") from None


def check_tuple(values: object, kind: type[T], what: str, owner: str) -> tuple[T, ...]:
    wanted = f"{owner} returned {what} = {format_value(values)}, and it must be a list of {kind.__name__}"
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise protocol(wanted)
    found = []
    for one in values:
        if not isinstance(one, kind):
            raise protocol(f"{owner} returned {format_value(one)} among {what}, and each must be a {kind.__name__}")
        found.append(one)
    return tuple(found)


def text_in(value: object, what: str, owner: str) -> str:
    if not isinstance(value, str):
        raise protocol(f"{owner} returned {what} that is {format_value(value)}, and it must be a text")
    return plain_text(value)


def protocol(detail: str) -> EnvFault:
    return EnvFault(detail, "protocol")


def check(holds: bool, detail: str) -> None:
    if not holds:
        raise protocol(detail)
