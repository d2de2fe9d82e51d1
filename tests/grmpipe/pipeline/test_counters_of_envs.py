"""What is counted of episodes in an environment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grmpipe.models.types import Completion, VersionSpan
from grmpipe.pipeline.counters import EnvCounts
from grmpipe.types import Rollout, Turn


def turn(num_new: int, num_sampled: int, cached_tokens: int) -> Turn:
    completion = Completion(
        token_ids=(1,) * num_sampled,
        logprobs=(-1.0,) * num_sampled,
        text="",
        finish_reason="stop",
        versions=(VersionSpan(model="policy", version=0, start=0, end=num_sampled),),
        cached_tokens=cached_tokens,
    )
    return Turn(new_ids=(2,) * num_new, completion=completion)


@pytest.mark.parametrize(("cached", "prefilled"), [(0, 30 + 45 + 60), (39, 30 + (45 - 39) + (60 - 39))])
def test_the_share_of_prefilled_tokens_counts_an_episode_once_and_its_prompts_without_what_was_cached(
    cached: int, prefilled: int
) -> None:
    counts = EnvCounts()
    turns = (turn(30, 10, 0), turn(5, 10, cached), turn(5, 10, cached))
    counts.rollout(Rollout(group_id="g", sibling=0, turns=turns, status="finished", took_s=1.0))
    assert counts.metrics()["env/prefilled_share"] == prefilled / 70
    assert EnvCounts.restore(counts.to_dict()).prefilled == prefilled


def test_a_reward_is_a_metric_by_its_name_averaged_over_the_episodes_that_have_it() -> None:
    counts, step = EnvCounts(), EnvCounts()
    for rewards in ({"solved": 1.0, "moves": -3.0}, {"moves": -5.0}, {}):
        turns = (replace(turn(3, 2, 0), rewards=rewards), replace(turn(1, 2, 0), rewards={"moves": -1.0}))
        step.rollout(Rollout(group_id="g", sibling=0, turns=turns, status="finished", took_s=1.0))
    counts += step
    metrics = EnvCounts.restore(counts.to_dict()).metrics()
    assert (metrics["env/reward_solved"], metrics["env/reward_moves"]) == (1.0, (-4 - 6 - 1) / 3)
