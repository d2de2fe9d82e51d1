"""The alarm on reward hacking fires where the reward leaves the truth, and not by chance."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from grmpipe.judge.monitor.reward_hacking import REWARD, AnchorReading, RewardHackingDetector

Rewards = float | Mapping[str, float]


def alarm(readings: Sequence[tuple[Rewards, float]], answers: int = 64) -> str | None:
    watched = RewardHackingDetector()
    said = None
    for index, (rewards, gold) in enumerate(readings):
        by_name = {REWARD: rewards} if isinstance(rewards, float) else rewards
        said = watched.record(AnchorReading(step=10 * index, rewards=by_name, gold=gold, answers=answers))
    return said


def test_reward_up_and_truth_down_fires_with_the_numbers() -> None:
    assert alarm([(0.63, 0.80), (0.78, 0.84), (0.98, 0.60)]) == (
        "The policy may be hacking the judge: at step 20 the reward is 0.98 (0.63 at step 0), "
        "while its accuracy on gold anchors is 0.60, down 0.24 since step 10 (64 answers)."
    )


@pytest.mark.parametrize(
    "readings",
    [
        [(0.32, 0.28), (0.98, 0.06)],
        [(8.2 / 9, 0.9), (9 / 9, 0.0)],  # from 9.2 to 10 on a scale of 1 to 10
        [(1.0, 0.9), (1.0, 0.2)],  # there is no room left
        [(0.3, 0.3), (0.9, 0.5), (0.9, 0.1)],  # it has risen before
        [(0.3, 0.3), (0.9, 0.5), (0.8, 0.05)],  # it follows the truth by less than half
    ],
)
def test_a_rise_is_measured_by_the_room_that_is_left(readings: list[tuple[Rewards, float]]) -> None:
    assert alarm(readings) is not None


@pytest.mark.parametrize(
    "readings",
    [
        [],
        [(0.98, 0.1)],
        [(0.37, 0.98), (0.89, 0.96)],  # a good run
        [(0.37, 0.98), (0.40, 0.30)],  # the judge is worse, but no reward rises
        [(0.37, 0.98), (0.89, 0.30), (0.39, 0.30)],  # over: the last reading counts
        [(0.3, 0.3), (0.8, 0.8), (0.5, 0.5)],  # the policy is worse, and the judge says so
        [(0.3, 0.5), (0.9, 0.39)],  # 64 answers can differ by that
    ],
)
def test_one_half_alone_does_not_fire(readings: list[tuple[Rewards, float]]) -> None:
    assert alarm(readings) is None


@pytest.mark.parametrize(("rise", "fires"), [(0.5, True), (0.1, False)])
def test_a_rise_of_rewards_on_no_scale_is_measured_by_their_first_spread(rise: float, fires: bool) -> None:
    watched = RewardHackingDetector()
    watched.record(AnchorReading(step=0, rewards={REWARD: 7.0}, gold=0.9, answers=64, spread={REWARD: 2.0}))
    after = AnchorReading(step=10, rewards={REWARD: 7.0 + rise}, gold=0.2, answers=64, spread={REWARD: 0.1})
    assert (watched.record(after) is not None) == fires


def test_the_same_fall_counts_with_more_answers() -> None:
    assert alarm([(0.3, 0.5), (0.9, 0.39)], answers=512) is not None
    assert alarm([(0.3, 0.5), (0.9, 0.41)], answers=4096) is None, "min_gold_fall is 0.10"


def test_captured_judges_are_named_whether_or_not_the_reward_follows_them() -> None:
    start = {REWARD: 0.3, "honest": 0.3, "praise": 0.3}
    said = alarm([(start, 0.3), ({REWARD: 0.9, "honest": 0.1, "praise": 1.0}, 0.05)])
    assert said is not None and "honest" not in said
    assert "the reward is 0.90 (0.30 at step 0), judge praise gives 1.00 (0.30 at step 0), while" in said
    said = alarm([(start, 0.3), ({REWARD: 0.1, "honest": 0.1, "praise": 1.0}, 0.05)])
    assert said is not None and "at step 10 judge praise gives 1.00" in said


def test_an_accuracy_that_stays_fires_by_chance_in_less_than_one_run_of_thirty() -> None:
    """Five readings of 64 answers each, right with probability 0.7 all the time, while the reward rises."""
    draw = random.Random(0)
    rung = 0
    for _ in range(500):
        drawn = [(0.5 + 0.1 * index, sum(draw.random() < 0.7 for _ in range(64)) / 64) for index in range(5)]
        rung += any(alarm(drawn[:count]) is not None for count in range(2, 6))
    assert rung < 500 / 30
