"""The positions of rewards, and their penalties, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from grmpipe.algorithm.advantages import returns
from grmpipe.algorithm.rewards import Rewards, overlong, place_rewards, shape_rewards
from grmpipe.algorithm.settings import OverlongConfig
from grmpipe.config.train import AlgorithmConfig
from grmpipe.models.types import Completion, VersionSpan
from grmpipe.train.batching.samples import compute_rewards, rollout_key
from grmpipe.types import RewardSpan, Rollout, Turn, Verdict


def rollout(*lengths: int) -> Rollout:
    """One turn of each length."""
    turns = tuple(
        Turn(
            new_ids=(1,),
            completion=Completion(
                token_ids=(7,) * length,
                logprobs=(-1.0,) * length,
                text="",
                finish_reason="stop",
                versions=(VersionSpan(model="policy", version=0, start=0, end=length),),
            ),
        )
        for length in lengths
    )
    return Rollout(group_id="g", sibling=0, turns=turns, status="finished")


def verdict(*spans: tuple[int, int, int, float]) -> Verdict:
    rewards = tuple(RewardSpan(turn=turn, start=start, end=end, value=value) for turn, start, end, value in spans)
    return Verdict(rewards=rewards, score=0.0, breakdown={}, score_std=0.0, num_judgements=1)


def test_an_outcome_is_one_step_over_all_turns() -> None:
    found = place_rewards(rollout(3, 2), verdict((1, 0, 2, 0.5)))
    assert found == Rewards(num_tokens=5, ends_K=(5,), values_K=(0.5,), turn_ends_U=(3, 5), state_keys_U=("", ""))
    assert found.spread(np.array([9.0])).tolist() == [9.0] * 5


def test_spans_of_turns_and_steps_are_laid_end_to_end() -> None:
    found = place_rewards(rollout(3, 4), verdict((1, 0, 2, 2.0), (0, 0, 3, 1.0), (1, 2, 3, 4.0)))
    assert (found.num_tokens, found.ends_K, found.values_K) == (7, (3, 5, 6), (1.0, 2.0, 4.0))
    assert found.spread(np.array([1.0, 2.0, 3.0])).tolist() == [1, 1, 1, 2, 2, 3, 0]
    assert found.outcome == 7.0


def test_spans_that_end_together_are_one_step() -> None:
    """The last step's reward, and an outcome over the whole turn."""
    found = place_rewards(rollout(4), verdict((0, 0, 2, 1.0), (0, 2, 4, 0.5), (0, 0, 4, 10.0)))
    assert (found.ends_K, found.values_K) == ((2, 4), (1.0, 10.5))


@pytest.mark.parametrize(("num_tokens", "share"), [(10, 0.0), (80, 0.0), (85, 0.25), (90, 0.5), (100, 1.0), (120, 1.0)])
def test_overlong_grows_over_the_buffer(num_tokens: int, share: float) -> None:
    assert overlong(num_tokens, 100, 20) == share


def test_an_overlong_turn_costs_its_rollout_the_penalty_at_the_end() -> None:
    algorithm = AlgorithmConfig(overlong_buffer=OverlongConfig(share=0.4, penalty=2.0))
    played = rollout(3, 9)
    found = shape_rewards(place_rewards(played, verdict((0, 0, 3, 1.0), (1, 0, 9, 1.0))), played, algorithm, 10, None)
    assert found.values_K == (1.0, 1.0 - 2.0 * 0.75)


@pytest.mark.parametrize(("estimator", "expected"), [("reinforce_pp", [0.5, 1, 1, 1]), ("grpo", [0.5] * 4)])
def test_reinforce_pp_charges_a_token_with_the_kl_from_there_on(estimator: str, expected: list[float]) -> None:
    """A_t = r - beta sum of KL_i from t on (arXiv 2501.03262, as in verl); here 5 nats on the first of four tokens."""
    algorithm = AlgorithmConfig(estimator=estimator, kl_coefficient=0.1, kl_in_reward=True)
    played = rollout(4)
    kl = {rollout_key(played): np.array([5.0, 0.0, 0.0, 0.0])}
    found = compute_rewards(played, verdict((0, 0, 4, 1.0)), algorithm, algorithm.estimator_kind, kl=kl)
    assert found.spread(returns(found.values_K, 1.0)).tolist() == pytest.approx(expected)


def test_kl_is_taken_off_the_step_that_its_tokens_are_in() -> None:
    """Tokens after the last reward belong to the last step."""
    algorithm = AlgorithmConfig(kl_coefficient=0.1, kl_in_reward=True)
    played = rollout(6)
    found = shape_rewards(
        place_rewards(played, verdict((0, 0, 2, 1.0), (0, 2, 5, 2.0))), played, algorithm, 0, np.arange(6.0)
    )
    assert found.values_K == pytest.approx((1.0 - 0.1 * (0 + 1), 2.0 - 0.1 * (2 + 3 + 4 + 5)))
    assert found.outcome == pytest.approx(3.0 - 0.1 * 15)
