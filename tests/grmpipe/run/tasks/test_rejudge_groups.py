"""The advantages of a run's groups, estimated again, are those of its training."""

from __future__ import annotations

import pytest

from grmpipe.config.data import RolloutConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.types import Completion, VersionSpan
from grmpipe.run.tasks.rejudge import estimate_advantages
from grmpipe.types import JudgedGroup, Prompt, RewardSpan, Rollout, Turn, Verdict


@pytest.mark.parametrize(("truncated", "expected"), [("mask", [0.5, -0.5]), ("train", [0.0, -1.0, 1.0])])
def test_a_masked_rollout_has_no_advantage_and_is_in_no_mean_over_tokens(truncated: str, expected: list[float]) -> None:
    """Rewards 2, 1 and 3 of one token each, the last one truncated, whitened without a deviation."""
    span = VersionSpan(model="policy", version=0, start=0, end=1)
    completion = Completion(token_ids=(5,), logprobs=(-1.0,), text="", finish_reason="stop", versions=(span,))
    rollouts = [
        Rollout(group_id="g", sibling=n, turns=(Turn(new_ids=(1,), completion=completion),), status=status)
        for n, status in enumerate(("finished", "finished", "truncated"))
    ]  # fmt: skip
    verdicts = [
        Verdict(rewards=(RewardSpan(turn=0, start=0, end=1, value=value),), score=0.0, breakdown={}, score_std=0.0,
                num_judgements=1)
        for value in (2.0, 1.0, 3.0)
    ]  # fmt: skip
    group = JudgedGroup(
        group_id="g", prompt=Prompt(prompt_id="p", messages=()), rollouts=tuple(rollouts), verdicts=tuple(verdicts)
    )
    algorithm, rollout = AlgorithmConfig(estimator="reinforce_pp", std="none"), RolloutConfig(truncated=truncated)
    assert [*estimate_advantages([group], algorithm, TrainConfig(), rollout).values()] == pytest.approx(expected)
