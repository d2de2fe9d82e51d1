"""Episodes of workflows in this process: rewards, faults, time, and that nothing is left open."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch

from grmpipe.config.keys.user_code import describe_code
from grmpipe.envs.checked_env import NO_RULES
from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.envs.fault_owner import FaultRules
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.play import RolloutRequest
from grmpipe.models.types import EngineDied, Message, ignore_first_token
from grmpipe.types import Prompt, Rollout
from grmpipe.workflows.chat import ChatRefused
from grmpipe.workflows.outcome import plain_rewards, read_rewards
from grmpipe.workflows.play_workflow import WorkflowPlayer
from grmpipe.workflows.policy import Policy, Task
from grmpipe.workflows.server import Gateway

PROMPT = Prompt(
    prompt_id="p", messages=(Message(role="user", content="?"),), info={"n": 3}, reference="SECRET", source="s"
)
Workflow = Callable[[Task, Policy], Awaitable[object]]


class Running:
    """A solver that calls a function."""

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow

    async def solve(self, task: Task, policy: Policy) -> object:
        return await self._workflow(task, policy)

    async def close(self) -> None: ...


@pytest.fixture
def played(make_engine: Callable, make_chats: Callable, request_of: RolloutRequest) -> Callable[..., Rollout]:
    def run(
        workflow: Workflow,
        engine: object = None,
        *,
        step_s: float = 9.0,
        rules: FaultRules = NO_RULES,
        **limits: float,
    ) -> Rollout:
        async def play() -> Rollout:
            chats = make_chats(engine or make_engine(["one", "two", "three"]), **limits)
            times = StageLimits(boot_s=1, step_s=step_s, close_s=0.2, max_observation_chars=0)
            player = WorkflowPlayer(Running(workflow), Gateway(), times, rules, describe_code(workflow))
            counts = player.counts
            try:
                rollout = await player.play(chats, request_of, PROMPT, ignore_first_token)
            finally:
                assert (counts.opened, counts.closed + counts.killed) == (1, 1)
            assert len(asyncio.all_tasks()) == 1, "a task is left"
            return rollout

        return asyncio.run(play())

    return run


async def two_turns(task: Task, policy: Policy) -> list[str]:
    first = await policy.chat(task.messages)
    second = await policy.chat([*task.messages, first, {"role": "user", "content": "more"}])
    return [first.completion_id, second.completion_id]


def test_a_workflow_gets_the_task_and_not_what_only_judges_see(played: Callable) -> None:
    async def solve(task: Task, policy: Policy) -> None:
        assert (task.messages, task.info, task.prompt_id, task.seed) == (PROMPT.messages, {"n": 3}, "p", 50)
        assert "SECRET" not in repr(task)
        await two_turns(task, policy)

    rollout = played(solve)
    assert (rollout.group_id, rollout.sibling, rollout.status) == ("g", 1, "finished")
    assert 0 <= rollout.env_s <= rollout.took_s + 1e-4 and dict(rollout.env_rewards) == {}  # tenths of ms, summed


@pytest.mark.parametrize(
    ("returned", "rewards"),
    [
        (lambda ids: None, [{}, {}]),
        (lambda ids: 0.5, [{}, {"outcome": 0.5}]),
        (lambda ids: True, [{}, {"outcome": 1.0}]),
        (lambda ids: {"tests": 2, "style": -1.0}, [{}, {"tests": 2.0, "style": -1.0}]),
        (lambda ids: dict(zip(ids, (1, 2), strict=True)), [{"outcome": 1.0}, {"outcome": 2.0}]),
        (lambda ids: {ids[0]: 1}, [{"outcome": 1.0}, {}]),
        (lambda ids: {ids[0]: {"format": 1, "style": 0}, "tests": 3}, [{"format": 1.0, "style": 0.0}, {"tests": 3.0}]),
        (lambda ids: {ids[1]: 2, "tests": 3}, [{}, {"outcome": 2.0, "tests": 3.0}]),
        (lambda ids: {}, [{}, {}]),
        (lambda ids: np.float32(0.5), [{}, {"outcome": 0.5}]),
        (lambda ids: {ids[0]: np.bool_(True), ids[1]: torch.tensor(2)}, [{"outcome": 1.0}, {"outcome": 2.0}]),
    ],
)
def test_return_values_of_a_workflow_are_the_rewards_of_its_turns(
    played: Callable, returned: Callable, rewards: list[dict]
) -> None:
    async def solve(task: Task, policy: Policy) -> object:
        return returned(await two_turns(task, policy))

    assert [dict(turn.rewards) for turn in played(solve).turns] == rewards


@pytest.mark.parametrize(
    "returned",
    [
        "7",
        float("nan"),
        {"a": None},
        {"a": float("inf")},
        [1.0],
        {"id": 1, "chatcmpl-x": 2},
        {"x": {"y": 1}},
        {"id": {"y": "z"}},
        10**400,
        np.zeros(2),
        b"7",
    ],
)
def test_a_return_value_that_is_no_number_is_a_fault_and_no_reward(returned: object) -> None:
    with pytest.raises(EnvFault, match="returned") as fault:
        read_rewards(plain_rewards(returned, "my.solve"), ["id"])
    assert fault.value.cause == "protocol"


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"x": {"y": 1}}, r"\{'y': 1\.0\} as the reward x; return None, a finite number"),
        ({"id": {"y": {"z": 1}}}, r"\{'z': 1\} as the reward y; return None, a finite number"),
        ({"id": 1, "outcome": 2}, r"two rewards outcome for the turn id"),
        ({"tests": 1, "id": {"tests": 2}}, r"two rewards tests for the turn id"),
        ({"chatcmpl-x": 2}, r"no turn has the id chatcmpl-x"),
    ],
)
def test_a_mixture_that_can_not_be_used_is_a_fault_that_names_the_function(returned: object, said: str) -> None:
    with pytest.raises(EnvFault, match=f"^my.solve returned .*{said}"):
        read_rewards(plain_rewards(returned, "my.solve"), ["first", "id"], "my.solve")


def test_a_fault_of_the_policy_ends_the_episode_and_is_counted(played: Callable) -> None:
    async def solve(task: Task, policy: Policy) -> object:
        await two_turns(task, policy)
        raise PolicyFault("no such file", "path")

    rollout = played(solve)
    assert rollout.status == "finished" and [turn.faults for turn in rollout.turns] == [(), ("path",)]


class MaxTurnsExceeded(Exception):
    """As openai-agents raises it, which need not be installed."""


class TooManyMoves(Exception):
    """A user's own."""


class TooManyMovesAtNight(TooManyMoves): ...


MaxTurnsExceeded.__module__ = "agents.exceptions"
OWN_ERRORS = FaultRules(policy_errors=(f"{__name__}.TooManyMoves",))


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (MaxTurnsExceeded, "MaxTurnsExceeded"),
        (TooManyMoves, "TooManyMoves"),
        (TooManyMovesAtNight, "TooManyMoves"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_exception_that_is_the_policys_doing_ends_the_episode_which_keeps_its_turns(
    played: Callable, raised: type[Exception], kind: str, is_wrapped: bool
) -> None:
    async def solve(task: Task, policy: Policy) -> object:
        await two_turns(task, policy)
        if not is_wrapped:
            raise raised("10 turns")
        try:
            raise raised("10 turns")
        except raised as error:
            raise RuntimeError("the agent failed") from error

    rollout = played(solve, rules=OWN_ERRORS)
    assert (rollout.attempt, [turn.faults for turn in rollout.turns]) == (0, [(), (kind,)])


def test_unnamed_exception_is_blamed_on_the_environment(played: Callable) -> None:
    async def solve(task: Task, policy: Policy) -> object:
        await policy.chat(task.messages)
        raise TooManyMoves

    with pytest.raises(EnvFault, match="TooManyMoves"):
        played(solve)


async def never_asks(task: Task, policy: Policy) -> float:
    return 1.0


async def raises_fault(task: Task, policy: Policy) -> None:
    await policy.chat(task.messages)
    raise EnvFault("no disk", "capacity")


async def breaks(task: Task, policy: Policy) -> None:
    await policy.chat(task.messages)
    raise KeyError("oops")


async def cancels_itself(task: Task, policy: Policy) -> None:
    await policy.chat(task.messages)
    raise asyncio.CancelledError


async def leaves(task: Task, policy: Policy) -> None:
    await policy.chat(task.messages)
    sys.exit(3)


async def turns_before_the_first(task: Task, policy: Policy) -> None:
    raise MaxTurnsExceeded("Max turns (0) exceeded")


async def asks_too_much(task: Task, policy: Policy) -> None:
    await policy.chat([{"role": "user", "content": "x" * 99}])


@pytest.mark.parametrize(
    ("workflow", "cause", "said"),
    [
        (never_asks, "protocol", "without a turn"),
        (raises_fault, "capacity", "no disk"),
        (breaks, "broken", "raised KeyError: 'oops'"),
        (cancels_itself, "broken", "CancelledError"),
        (leaves, "broken", r"leaves \(.*\) raised SystemExit: 3"),
        (turns_before_the_first, "broken", "MaxTurnsExceeded"),
        (asks_too_much, "protocol", "without a turn .* refused: the context window"),
    ],
)
def test_everything_else_is_a_fault_of_the_environment(
    played: Callable, workflow: Workflow, cause: str, said: str
) -> None:
    with pytest.raises(EnvFault, match=said) as fault:
        played(workflow, context_tokens=60)
    assert fault.value.cause == cause


@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_turns": 1}, "turns"), ({"context_tokens": 12}, "context")], ids=["turns", "context"]
)
@pytest.mark.parametrize("end", ["raises", "wraps", "returns"])
def test_an_episode_that_ends_with_a_refusal_was_truncated_by_it(
    played: Callable, limits: dict, reason: str, end: str
) -> None:
    async def solve(task: Task, policy: Policy) -> object:
        try:
            await two_turns(task, policy)
        except ChatRefused as refused:
            if end == "returns":
                return 0.25
            raise (refused if end == "raises" else RuntimeError("the agent's own error")) from None
        raise AssertionError

    rollout = played(solve, **limits)
    assert (rollout.status, rollout.reason, len(rollout.turns)) == ("truncated", reason, 1)
    assert dict(rollout.env_rewards) == ({"outcome": 0.25} if end == "returns" else {})


def test_time_that_went_to_sampling_truncates_and_keeps_the_finished_turns(
    played: Callable, make_engine: Callable
) -> None:
    engine = make_engine(["one", "never"])

    async def solve(task: Task, policy: Policy) -> object:
        await policy.chat(task.messages)
        engine.held = asyncio.Event()
        await policy.chat([{"role": "user", "content": "two"}])
        raise AssertionError

    rollout = played(solve, engine, step_s=0.3, episode_s=0.5)
    assert (rollout.reason, [turn.completion.text for turn in rollout.turns]) == ("time", ["one"])
    assert engine.aborted == 1


@pytest.mark.parametrize("asks", [True, False])
def test_a_workflow_that_hangs_is_a_fault_and_no_truncation(played: Callable, asks: bool) -> None:
    async def solve(task: Task, policy: Policy) -> object:
        if asks:
            await policy.chat(task.messages)
        await asyncio.sleep(60)
        return 1.0

    with pytest.raises(EnvFault, match=r"env\.episode_s = 0\.2 s, and didn't ask") as fault:
        played(solve, step_s=0.1, episode_s=0.2)
    assert fault.value.cause == "timeout"


def test_a_reward_that_comes_after_the_time_does_not_count(played: Callable) -> None:
    async def solve(task: Task, policy: Policy) -> object:
        await policy.chat(task.messages)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 1.0

    rollout = played(solve, step_s=9.0, episode_s=0.1)
    assert rollout.reason == "time" and dict(rollout.env_rewards) == {}


def test_error_of_the_engine_is_raised_even_if_the_workflow_catches_it(played: Callable, make_engine: Callable) -> None:
    async def solve(task: Task, policy: Policy) -> object:
        while True:
            try:
                await policy.chat(task.messages)
            except ChatRefused:
                await asyncio.sleep(0.01)

    with pytest.raises(EngineDied, match="no engine is left"):
        played(solve, make_engine(error=EngineDied("no engine is left")))


def test_a_cancelled_episode_cancels_its_workflow(
    make_engine: Callable, make_chats: Callable, request_of: RolloutRequest
) -> None:
    ended = []

    async def solve(task: Task, policy: Policy) -> object:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(task)

    async def play() -> None:
        limits = StageLimits(boot_s=1, step_s=9, close_s=1, max_observation_chars=0)
        chats, player = make_chats(make_engine()), WorkflowPlayer(Running(solve), Gateway(), limits)
        playing = asyncio.ensure_future(player.play(chats, request_of, PROMPT, ignore_first_token))
        await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait({playing})
        assert playing.cancelled() and len(ended) == 1

    asyncio.run(play())
