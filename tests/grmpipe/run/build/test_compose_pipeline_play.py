"""The wrappers of an episode in a real run."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.envs.env import EnvFault
from grmpipe.envs.play import NotAsBefore, RolloutRequest
from grmpipe.envs.retry_episode import free_after
from grmpipe.run.build.compose_pipeline import from_start_if_changed
from grmpipe.types import BegunRollout, Prompt, Rollout

PROMPT = Prompt(prompt_id="p", messages=())


class Engines:
    def __init__(self) -> None:
        self.ended: list[str] = []

    def end_trajectory(self, trajectory_id: str) -> None:
        self.ended.append(trajectory_id)


@pytest.mark.parametrize("end", ["finished", "fault", "cancelled"])
def test_engines_free_the_cache_of_an_episode_however_it_ends(end: str) -> None:
    engines = Engines()

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: object) -> Rollout:
        assert not engines.ended
        if end == "cancelled":
            await asyncio.sleep(60)
        if end == "fault":
            raise EnvFault("gone", "died")
        return Rollout(group_id="g", sibling=2, turns=(), status="finished")

    async def main() -> None:
        request = RolloutRequest(group_id="g", sibling=2, seed=0, attempt=1)
        playing = asyncio.create_task(free_after(play, engines)(request, PROMPT, lambda: None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        playing.cancel() if end == "cancelled" else None
        await asyncio.wait({playing})
        assert engines.ended == ["g/2/a1"]
        if not playing.cancelled():
            playing.exception()

    asyncio.run(main())


def test_an_episode_that_can_not_go_on_is_played_from_its_start_by_the_same_seed() -> None:
    rollout, asked = Rollout(group_id="g", sibling=2, turns=(), status="finished"), list[RolloutRequest]()

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: object) -> Rollout:
        asked.append(request)
        if request.begun is not None:
            raise NotAsBefore("turn 0 brought another reply than before")
        return rollout

    request = RolloutRequest(group_id="g", sibling=2, seed=5, begun=BegunRollout(so_far=rollout))
    assert asyncio.run(from_start_if_changed(play)(request, PROMPT, lambda: None)) is rollout  # type: ignore[arg-type]
    assert [(one.begun is None, one.seed, one.attempt) for one in asked] == [(False, 5, 0), (True, 5, 0)]
