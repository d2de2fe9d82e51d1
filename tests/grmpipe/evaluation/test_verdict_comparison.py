"""Two judges' verdicts on the same rollouts: agreement, flips, truth, signs, the step from which they part."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from grmpipe.evaluation.verdict_comparison import (
    ComparedGroup,
    ComparedRollout,
    compare,
    find_parting_step,
    list_metrics,
)


def group(name: str, *rollouts: tuple[float | None, ...], step: int | None = 1) -> ComparedGroup:
    """rollouts: (old, new) or (old, new, right) or (old, new, right, old advantage, new advantage)."""
    fields = ("old", "new", "right", "old_advantage", "new_advantage")
    return ComparedGroup(
        group_id=name,
        step=step,
        rollouts=tuple(ComparedRollout(**dict(zip(fields, one, strict=False))) for one in rollouts),  # type: ignore[arg-type]
    )


def test_rank_correlation_is_spearmans_within_groups() -> None:
    swapped = group("a", (0.1, 0.1), (0.2, 0.9), (0.3, 0.5), (0.4, 1.0))
    assert compare([swapped]).overall.rank_correlation.mean == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    tied = group("b", (0.5, 0.1), (0.5, 0.2), (0.9, 0.3))
    assert compare([tied]).overall.rank_correlation.mean == pytest.approx(math.sqrt(0.75))
    alike = group("c", (0.5, 0.1), (0.5, 0.9))  # one judge tells nothing apart: no correlation, rather than 0
    both = compare([swapped, alike]).overall.rank_correlation
    assert (both.mean, both.num_clusters) == (pytest.approx(0.8), 1)


def test_flips_are_pairs_that_both_judges_order_and_not_alike() -> None:
    found = compare([group("a", (0.1, 0.3), (0.2, 0.2), (0.2, 0.9))]).overall.flips
    assert found.mean == pytest.approx(1 / 2)  # of three pairs the run's judge ties one
    many = [group(f"g{n}", (0.1, 0.2), (0.2, 0.1) if n < 20 else (0.2, 0.3)) for n in range(100)]
    found = compare(many).overall.flips
    assert found.mean == pytest.approx(0.2) and 0.12 < found.low < 0.15 and 0.27 < found.high < 0.31


def test_a_failed_verdict_is_left_out_of_everything() -> None:
    whole = group("a", (0.1, 0.9, 0.0), (0.5, 0.2, 1.0), step=1)
    lacking = group("a", (0.1, 0.9, 0.0), (0.5, 0.2, 1.0), (0.9, None, 1.0), step=1)
    one, other = compare([whole]), compare([lacking])
    assert (other.num_rollouts, other.num_compared) == (3, 2)
    assert other.overall.flips == one.overall.flips and other.overall.new_accuracy == one.overall.new_accuracy
    assert other.steps[0].new_reward == one.steps[0].new_reward == pytest.approx(0.55)


def test_accuracy_counts_pairs_of_a_right_and_a_wrong_sibling_and_a_tie_half() -> None:
    overall = compare([group("a", (0.9, 0.5, 1.0), (0.1, 0.5, 0.0), (0.95, 0.4, 0.0))]).overall
    assert overall.old_accuracy.mean == pytest.approx(0.5) and overall.new_accuracy.mean == pytest.approx(0.75)
    without_truth = compare([group("a", (0.9, 0.5), (0.1, 0.4))])
    assert math.isnan(without_truth.overall.old_accuracy.mean) and without_truth.parts_from_truth is None


def test_the_difference_of_both_judges_is_paired_and_over_groups() -> None:
    """The new judge orders the first pair better, the second alike; the third lacks a verdict of the run's judge."""
    groups = [group(f"g{n}", (0.1, 0.9, 1.0), (0.5, 0.2, 0.0), (None, 0.1, 0.0)) for n in range(6)]
    groups += [group(f"h{n}", (0.5, 0.9, 1.0), (0.5, 0.2, 0.0)) for n in range(6)]
    found = compare(groups).overall
    assert found.accuracy_difference.mean == pytest.approx((6 * 1 + 6 * 0.5) / 12)
    assert (found.accuracy_difference.num_values, found.accuracy_difference.num_clusters) == (12, 12)
    assert 0.4 < found.accuracy_difference.low < 0.75 < found.accuracy_difference.high < 1
    assert found.accuracy_difference.p < 0.001
    assert list_metrics(compare(groups))["accuracy_difference"] == found.accuracy_difference.mean


def test_a_sign_changes_only_from_plus_to_minus_or_back() -> None:
    signs = [(1.0, -1.0), (1.0, 0.5), (0.0, 1.0), (-1.0, 1.0), (0.0, 0.0)]
    one = group("a", *((0.5, 0.5, None, old, new) for old, new in signs))
    assert compare([one]).overall.sign_changes.mean == pytest.approx(2 / 4)  # of those that have a sign


def test_groups_of_no_step_count_overall_and_in_no_step() -> None:
    result = compare([group("a", (0.1, 0.2), step=None), group("b", (0.3, 0.4), step=7)])
    assert [one.step for one in result.steps] == [7] and result.num_compared == 2


STEPS = range(1, 41)


def noisy(levels: list[float], seed: int) -> list[float]:
    draw = random.Random(seed)
    return [level + draw.gauss(0, 0.05) for level in levels]


def hacked(first: int, low: float, high: float) -> list[float]:
    """From `first` on it goes from one level to the other, within five steps."""
    return [low + (high - low) * min(1, max(0, (step - first) / 5)) for step in STEPS]


@pytest.mark.parametrize("first", [8, 15, 25])
def test_a_reward_parts_from_the_truth_where_only_it_rises(first: int) -> None:
    reward, truth = noisy(hacked(first, 0.4, 0.9), 1), noisy(hacked(first, 0.5, 0.1), 2)
    found = find_parting_step(STEPS, reward, truth)
    assert found is not None and first <= found <= first + 5
    on_another_scale = [10 * value - 3 for value in reward]
    assert find_parting_step(STEPS, on_another_scale, truth) == found


@pytest.mark.parametrize("begins", [0, 20])
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_reward_that_leaves_the_truth_slowly_is_found_too(begins: int, noise: float) -> None:
    """Half of the noisy ones: what moves by less than its noise may as well have wandered."""
    away = [max(0, step - begins) / (len(STEPS) - begins) for step in STEPS]
    found = 0
    for seed in range(20):
        draw = random.Random(seed)
        together = [0.4 + 0.01 * min(step, 20) for step in STEPS]
        reward = [level + 0.4 * part + draw.gauss(0, noise) for level, part in zip(together, away, strict=True)]
        truth = [level - 0.6 * part + draw.gauss(0, noise) for level, part in zip(together, away, strict=True)]
        found += find_parting_step(STEPS, reward, truth) is not None
    assert found >= (18 if noise < 0.1 else 10)


@pytest.mark.parametrize("num_steps", [20, 50, pytest.param(150, marks=pytest.mark.long)])
def test_of_two_hundred_pairs_of_random_walks_at_most_ten_part(num_steps: int) -> None:
    parted = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        walks = [draw.normal(size=num_steps).cumsum().tolist() for _ in range(2)]
        parted += find_parting_step(range(num_steps), *walks) is not None
    assert parted <= 10


def test_series_that_rise_together_and_noise_part_nowhere() -> None:
    rising = hacked(10, 0.2, 0.8)
    assert find_parting_step(STEPS, noisy(rising, 3), noisy(rising, 4)) is None
    assert find_parting_step(STEPS, noisy(hacked(10, 0.8, 0.2), 3), noisy(hacked(10, 0.2, 0.8), 4)) is None, "it falls"
    flat = [0.5] * len(STEPS)
    found = [find_parting_step(STEPS, noisy(flat, seed), noisy(flat, seed + 1000)) for seed in range(100)]
    assert sum(step is not None for step in found) <= 1
    assert find_parting_step([1, 2, 3, 4], [0.1, 0.2, 0.8, 0.9], [0.9, 0.8, 0.2, 0.1]) is None, "too few"
