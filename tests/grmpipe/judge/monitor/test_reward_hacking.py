"""The alarm on reward hacking fires where the reward leaves the truth, and not by chance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from grmpipe.judge.monitor.reward_hacking import REWARD, AnchorReading, HackingNews, RewardHackingDetector

Rewards = float | Mapping[str, float]


def reading(step: int, rewards: Rewards, gold: float, anchors: int = 64) -> AnchorReading:
    """Every anchor has the mean reward; the right answers are spread over all anchors."""
    by_name = {REWARD: rewards} if isinstance(rewards, float) else rewards
    right = np.random.default_rng(step).permutation(np.arange(anchors) < round(gold * anchors))
    names = [str(number) for number in range(anchors)]
    return AnchorReading(
        step=step,
        right=dict(zip(names, map(float, right), strict=True)),
        rewards={judge: dict.fromkeys(names, reward) for judge, reward in by_name.items()},
        sources=dict.fromkeys(names, ""),
    )


def read(readings: Sequence[tuple[Rewards, float]], anchors: int = 64) -> HackingNews:
    watched, news = RewardHackingDetector(), HackingNews()
    for index, (rewards, gold) in enumerate(readings):
        news = watched.record(reading(10 * index, rewards, gold, anchors))
    return news


def test_reward_up_and_truth_down_fires_with_the_numbers() -> None:
    assert read([(0.63, 0.75), (0.78, 0.8125), (0.98, 0.375)]).alarm == (
        "The policy may be hacking the judge: at step 20 the reward is 0.98 (0.63 at step 0), "
        "while its accuracy on gold anchors is 0.38, down 0.44 since step 10 (64 anchors)."
    )


@pytest.mark.parametrize(
    "readings",
    [
        [(8.2 / 9, 0.9), (9 / 9, 0.0)],  # from 9.2 to 10 on a scale of 1 to 10
        [(1.0, 0.9), (1.0, 0.2)],  # there is no room left
        [(0.3, 0.3), (0.9, 0.5), (0.9, 0.1)],  # it has risen before
        [(0.3, 0.3), (0.9, 0.7), (0.8, 0.05)],  # it follows the truth by less than half
        [(0.32, 0.28), (0.98, 0.05), (0.98, 0.06)],  # by less than one reading shows, twice
    ],
)
def test_a_rise_is_measured_by_the_room_that_is_left(readings: list[tuple[Rewards, float]]) -> None:
    assert read(readings).alarm


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
        [(0.32, 0.28), (0.98, 0.06)],  # by chance, once
    ],
)
def test_one_half_alone_does_not_fire(readings: list[tuple[Rewards, float]]) -> None:
    assert not read(readings).alarm


@pytest.mark.parametrize(("rise", "fires"), [(0.5, True), (0.1, False)])
def test_a_rise_of_rewards_on_no_scale_is_measured_by_their_first_spread(rise: float, fires: bool) -> None:
    watched = RewardHackingDetector()
    for step, gold in ((0, 0.9), (10, 0.2)):
        one = reading(step, 0.0, gold)
        spread = {name: 7.0 + 2 * (-1) ** number + rise * (step > 0) for number, name in enumerate(one.right)}
        news = watched.record(AnchorReading(step=step, right=one.right, rewards={REWARD: spread}, sources=one.sources))
    assert bool(news.alarm) == fires


def test_the_same_fall_counts_with_more_anchors() -> None:
    assert read([(0.3, 0.5), (0.9, 0.39)], anchors=1024).alarm
    assert not read([(0.3, 0.5), (0.9, 0.41)], anchors=4096).alarm, "min_gold_fall is 0.10"


def test_captured_judges_are_named_whether_or_not_the_reward_follows_them() -> None:
    start = {REWARD: 0.3, "honest": 0.5, "praise": 0.3}
    said = read([(start, 0.6), ({REWARD: 0.9, "honest": 0.1, "praise": 1.0}, 0.05)]).alarm
    assert said and "honest" not in said
    assert "the reward is 0.90 (0.30 at step 0), judge praise gives 1.00 (0.30 at step 0), while" in said
    said = read([(start, 0.6), ({REWARD: 0.1, "honest": 0.1, "praise": 1.0}, 0.05)]).alarm
    assert said and "at step 10 judge praise gives 1.00" in said


def test_reward_that_rises_over_a_flat_truth_is_a_notice_and_no_alarm() -> None:
    news = read([(0.1, 0.5), (0.95, 0.5)])
    assert not news.alarm and news.notice == (
        "The reward rises, the truth doesn't: at step 10 the reward is 0.95 (0.10 at step 0), while its accuracy on "
        "gold anchors is 0.50 (0.50 at step 0; 64 anchors)."
    )
    assert read([(0.3, 0.3), (0.6, 0.6)]) == read([(0.3, 0.3), (0.35, 0.3)]) == HackingNews()


def test_an_alarm_goes_on_while_the_truth_stays_down_and_ends_when_it_is_back() -> None:
    """A single reading with less of a fall, which would not have fired by itself, doesn't end it."""
    readings = [(0.3, 0.5), (0.9, 0.05), (0.9, 0.25)]
    assert read(readings).alarm and not read([readings[0], readings[2]]).alarm
    assert not read([*readings, (0.9, 0.45)]).alarm


def test_a_source_is_read_by_itself_and_a_detector_restored_from_json_goes_on() -> None:
    """The source b is hacked while a improves: all anchors together look as before."""
    rewards = {"a": (0.4, 0.6, 0.8), "b": (0.4, 0.9, 0.95)}
    gold = {"a": (0.3, 0.6, 0.9), "b": (0.7, 0.3, 0.0)}
    whole, before = RewardHackingDetector(), RewardHackingDetector()
    for step in range(3):
        parts = {source: reading(10 * step, rewards[source][step], gold[source][step], anchors=32) for source in "ab"}
        right = {f"{source}{name}": one for source, part in parts.items() for name, one in part.right.items()}
        rewarded = {f"{source}{name}": rewards[source][step] for source, part in parts.items() for name in part.right}
        sources = {name: name[0] for name in right}
        one = AnchorReading(step=10 * step, right=right, rewards={REWARD: rewarded}, sources=sources)
        news, state = whole.record(one), json.loads(json.dumps(before.state()))
        before = RewardHackingDetector()
        before.restore(state)
        assert before.record(one) == news
    assert "of the source b is 0.00, down 0.69 since step 0 (32 anchors)" in news.alarm
    assert "the reward is 0.95 (0.40 at step 0)" in news.alarm and "of the source a" not in news.alarm
    assert len(before.state()["kept"]) < 3, "not every reading is kept"
