"""Episodes that are played again after a fault of their environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from grmpipe.envs.env import EnvFault
from grmpipe.envs.play import RolloutRequest
from grmpipe.envs.retry_episode import EpisodeFailed, with_attempts
from grmpipe.models.types import ignore_first_token
from grmpipe.types import Prompt, Rollout

PROMPT = Prompt(prompt_id="p", messages=())


REQUEST = RolloutRequest(group_id="g", sibling=2, seed=7)


def tried(num_faults: int, attempts: int) -> tuple[list[RolloutRequest], Rollout | EpisodeFailed]:
    """The requests of all attempts at an episode whose first environments fail, and the result."""
    requests: list[RolloutRequest] = []

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        requests.append(request)
        if len(requests) <= num_faults:
            raise EnvFault(f"fault {len(requests)}", "died")
        return Rollout(group_id="g", sibling=2, turns=(), status="finished")

    try:
        played = with_attempts(play, attempts=attempts, retry_s=0.0)(REQUEST, PROMPT, ignore_first_token)
        return requests, asyncio.run(played)
    except EpisodeFailed as failed:
        return requests, failed


def test_an_episode_without_a_fault_is_the_request_as_it_was() -> None:
    requests, result = tried(num_faults=0, attempts=3)
    assert requests == [REQUEST]
    assert isinstance(result, Rollout) and result.env_failures == ()


def test_each_attempt_has_its_own_seed_and_names_and_the_faults_are_kept() -> None:
    requests, result = tried(num_faults=2, attempts=3)
    assert [request.attempt for request in requests] == [0, 1, 2]
    assert [request.trajectory_id for request in requests] == ["g/2", "g/2/a1", "g/2/a2"]
    assert len({request.seed for request in requests}) == 3
    assert isinstance(result, Rollout)
    assert [(f.stage, f.cause, f.detail) for f in result.env_failures] == [
        ("env", "died", "fault 1"), ("env", "died", "fault 2"),
    ]  # fmt: skip


def test_after_the_last_attempt_there_is_no_rollout_but_all_causes() -> None:
    requests, result = tried(num_faults=9, attempts=3)
    assert len(requests) == 3
    assert isinstance(result, EpisodeFailed)
    assert [failure.detail for failure in result.failures] == ["fault 1", "fault 2", "fault 3"]
    assert result.failed.cause == "died"
