"""Votes, by the numbers in the SPCT paper's example."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest

from grmpipe.algorithm.rewards import place_rewards
from grmpipe.config.judge import Scale
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.verdict import mix_verdicts, outcome_place
from grmpipe.judge.votes import (
    Weights,
    average_weighted,
    best_indices,
    count_votes,
    majority,
    mean,
    median,
    score_std,
    total,
    vote_named,
    voted,
)
from grmpipe.types import Criterion, RewardSpan, Verdict

JUDGEMENTS = ((1, 5), (5, 6), (4, 8), (7, 6))  # of two responses
FIRST, SECOND = zip(*JUDGEMENTS, strict=True)


def test_sums_are_those_of_the_paper() -> None:
    assert (total(FIRST), total(SECOND)) == (17, 25)
    assert (total((FIRST[0], FIRST[2])), total((SECOND[0], SECOND[2]))) == (5, 13)


def test_the_mean_keeps_the_scale() -> None:
    assert (mean(FIRST), mean(SECOND)) == (4.25, 6.25)


def test_one_judgement_far_off_moves_the_mean_but_not_the_median() -> None:
    assert median((8, 8, 9, 1)) == 8
    assert mean((8, 8, 9, 1)) == 6.5


def test_agreement_is_the_population_std_and_zero_for_one_vote() -> None:
    assert score_std((7,)) == 0
    assert score_std((2, 4)) == 1
    assert score_std(FIRST) == pytest.approx(4.6875**0.5)


def test_a_meta_rm_that_trusts_the_1st_and_3rd_gives_the_sums_of_the_paper() -> None:
    kept = best_indices((0.9, 0.2, 0.8, 0.1), 2)
    assert kept == [0, 2]
    assert (total([FIRST[index] for index in kept]), total([SECOND[index] for index in kept])) == (5, 13)


def test_first_of_equally_trusted_judgements_are_kept() -> None:
    assert best_indices((0.5, 0.5, 0.5, 0.9), 2) == [0, 3]


def test_weights_move_the_mean_and_none_at_all_leave_it() -> None:
    assert average_weighted((1, 9), (3, 1)) == 3
    assert average_weighted((1, 9), (0, 0)) == 5
    assert average_weighted((1, 9), (0, 1)) == 9


def test_the_majority_takes_what_most_gave_and_the_middle_of_a_tie() -> None:
    assert majority((7, 7, 1)) == 7
    assert majority((7, 1, 7, 1)) == 4
    assert majority((9, 2, 1)) == 4


def test_a_verdict_holds_the_vote_its_reward_on_the_scale_and_how_far_the_judgements_part() -> None:
    """Scores 2, 4 and 9 of 1 to 9: mean 5, the middle of the scale; population std sqrt(26 / 3)."""
    rollout = rollout_of_text("g", 3, "an answer")
    verdict = voted("mine", rollout, [2, 4, 9], mean, Scale(low=1, high=9))
    (span,) = verdict.rewards
    assert (span.turn, span.start, span.end) == (0, 0, len(rollout.turns[0].completion.token_ids))
    assert (verdict.score, span.value, verdict.breakdown, verdict.num_judgements) == (5, 0.5, {"mine": 0.5}, 3)
    assert verdict.score_std == pytest.approx(math.sqrt(26 / 3))
    assert voted("mine", rollout, [2, 4, 9], median, Scale(low=1, high=9)).score == 4


def test_parts_are_voted_on_where_no_judgement_has_all_of_them() -> None:
    place = outcome_place(rollout_of_text("g", 3, "an answer"))
    weights = Weights((0.75, 0.25))
    verdict = count_votes("mine", [(1, None), (None, 5)], mean, Scale(low=1, high=9), weights, (place,))
    assert (verdict.score, verdict.score_std, verdict.num_judgements) == (2, 0, 2)


def lowest(scores: list[float]) -> object:
    if len(scores) > 3:
        raise KeyError("many")
    return min(scores) if len(scores) > 1 else "one"


def test_a_vote_of_ones_own_is_asked_and_named_where_it_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_votes", sys.modules[__name__])
    vote = vote_named("my_votes.lowest")
    assert vote([3, 2, 5]) == 2
    with pytest.raises(
        ValueError, match=r"^judge\.vote: .*lowest .*returned 'one'; return a number, .* of 1 judgements"
    ):
        vote([3])
    with pytest.raises(ValueError, match=r"judge\.vote: .*lowest .*KeyError.*many") as raised:
        vote([1, 2, 3, 4])
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_fault_costs_what_it_costs_in_the_whole_rubric_where_criteria_are_left_out() -> None:
    rubric = [Criterion(text=text, weight=weight) for text, weight in (("right", 3), ("short", 1), ("rude", -2))]
    assert Weights.of_rubric(rubric, cap=0.5).parts == (0.75, 0.25, -0.5)
    assert Weights.of_rubric(rubric, cap=0.5, kept=rubric[::2]).parts == (1.0, -0.5)


def test_an_essential_criterion_that_is_half_met_caps_nothing() -> None:
    rubric = [Criterion(text="right", essential=True), Criterion(text="short", weight=3)]
    weights = Weights.of_rubric(rubric, cap=0.25)
    assert (weights.to_reward([0.5, 1.0]), weights.to_reward([0.49, 1.0])) == (0.875, 0.25)


def test_every_span_keeps_its_share_in_a_mix_with_a_mean_of_steps(bench: Any) -> None:
    """0.75 times the mean of steps with 1, 0 and 1/2, plus 0.25 times a rule's 1, which ends with the last step."""
    steps = tuple(
        RewardSpan(turn=0, start=4 * k, end=4 * k + 4, value=earned / 3, share=1 / 3)
        for k, earned in enumerate((1.0, 0.0, 0.5))
    )
    blank = Verdict(rewards=steps, score=5.0, breakdown={}, score_std=0.0, num_judgements=1)
    ruled = replace(blank, rewards=(RewardSpan(turn=0, start=0, end=12, value=1.0),))
    spans = mix_verdicts({"steps": blank, "rule": ruled}, {"steps": 3.0, "rule": 1.0}).rewards
    assert [(span.end, span.value, span.share) for span in spans] == [
        (4, 0.25, 0.25), (8, 0.0, 0.25), (12, pytest.approx(0.125), 0.25), (12, 0.25, 0.25),
    ]  # fmt: skip
    rewards = place_rewards(bench.rollout("x" * 12), replace(blank, rewards=spans))
    assert rewards.shares_K == pytest.approx((0.25, 0.25, 0.5))
    assert rewards.earned_K.tolist() == pytest.approx([1.0, 0.0, 0.75])
    assert rewards.outcome == pytest.approx(0.75 * 0.5 + 0.25)


def test_a_mixture_of_steps_and_of_rewards_by_turn_has_shares_that_sum_to_one() -> None:
    def verdict(*spans: RewardSpan) -> Verdict:
        return Verdict(rewards=spans, score=0.0, breakdown={}, score_std=0.0, num_judgements=1)

    steps = verdict(*(RewardSpan(turn=turn, start=0, end=2, value=0.25, share=0.5) for turn in (0, 1)))
    by_turn = verdict(*(RewardSpan(turn=turn, start=0, end=2, value=1.0) for turn in (0, 1, 2)))
    spans = mix_verdicts({"steps": steps, "env": by_turn}, {"steps": 1.0, "env": 1.0}).rewards
    assert math.fsum(span.share or 0.0 for span in spans) == pytest.approx(1)
    assert math.fsum(span.value for span in spans) == pytest.approx((0.5 + 3.0) / 2)
