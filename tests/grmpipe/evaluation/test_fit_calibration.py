"""A calibration is the monotone map nearest to the labels of half of the prompts, measured on the other half."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from configs import judge_config

from grmpipe.config.judge import Scale
from grmpipe.config.task_settings import CalibrateConfig
from grmpipe.evaluation.fit_calibration import (
    CalibrationResult,
    Point,
    collect_points,
    find_slope,
    find_threshold,
    fit_calibration,
    measure_reliability,
)
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.verdict import make_failure
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Completion, Message
from grmpipe.types import Judgement, JudgeReport, Labelled, Prompt, RankedResponses, ScoredResponse

SCALE, POINTWISE = Scale(), judge_config()
PAIRWISE = judge_config(
    protocol="pairwise", template="pairwise", parser="boxed", vote="majority", num_judgements=4, pairs="ring"
)
SILENT = Completion(token_ids=(), logprobs=(), text="", finish_reason="stop", versions=())


def ask(name: str) -> Prompt:
    return Prompt(prompt_id=name, messages=(Message(role="user", content=name),))


def score_item(number: int, label: float, *, is_yes_no: bool = True, text: str = "42") -> ScoredResponse:
    return ScoredResponse(
        item_id=f"i{number}", prompt=ask(f"q{number}"), response=text, score=label, is_yes_no=is_yes_no
    )


def report_score(sibling: int, score: float | None) -> JudgeReport:
    if score is None:
        return JudgeReport(verdict=make_failure("unparseable", "no score"))
    return JudgeReport(verdict=voted("generative", rollout_of_text("g", sibling, "x"), [score], mean, SCALE))


def judge_item(item: Labelled, *scores: float | None) -> JudgedItem:
    reports = tuple(report_score(sibling, score) for sibling, score in enumerate(scores))
    return JudgedItem(item=item, reports=reports, num_asked=1)


def fit(judged: Sequence[JudgedItem], *, by_length: bool = False, seed: int = 0) -> CalibrationResult:
    return fit_calibration(judged, POINTWISE, {"kind": "generative"}, CalibrateConfig(length=by_length), seed)


def overconfident(count: int, seed: int = 0) -> list[JudgedItem]:
    """Passes 40 % of wrong responses, as it passes right ones."""
    rng = random.Random(seed)
    judged = []
    for number in range(count):
        right = rng.random() < 0.5
        passes = right or rng.random() < 0.4
        score = rng.choice((8.0, 9.0, 10.0) if passes else (1.0, 2.0, 3.0))
        judged.append(judge_item(score_item(number, 10 if right else 1), score))
    return judged


def test_the_expected_error_is_the_mean_distance_of_each_bin() -> None:
    points = [Point(asked=n, said=said, label=label) for n, (said, label) in enumerate(
        [(0.95, 1.0), (0.97, 0.0), (0.05, 0.0), (0.05, 1.0), (0.5, 0.5)]
    )]  # fmt: skip
    found = measure_reliability(points, points)
    assert found.error.mean == pytest.approx((2 * 0.46 + 2 * 0.45 + 0) / 5)
    assert found.error.low < found.error.mean < found.error.high
    assert [one.count for one in found.curve] == [2, 1, 2]
    assert found.squared_error == pytest.approx(np.mean([(p.said - p.label) ** 2 for p in points]))


def test_a_calibration_halves_the_error_on_prompts_that_it_was_not_fitted_to() -> None:
    judged = overconfident(1200)
    result = fit([*judged, judge_item(score_item(5000, 10), None)])
    assert result.after.error.mean < result.before.error.mean / 2
    assert result.after.squared_error < result.before.squared_error
    assert (result.num_fitted + result.num_measured, result.num_failed) == (1200, 1)
    assert result.calibration.target == "right"
    assert result.calibration.to_reward(1.0, 0.0) == pytest.approx(1 / 1.4, abs=0.1)
    assert result == fit([*judged, judge_item(score_item(5000, 10), None)])  # by the seed
    assert result.calibration != fit(judged, seed=1).calibration


def test_halves_share_no_prompt() -> None:
    judged = [judge_item(score_item(number % 40, 10 if number % 3 else 1), 5.0 + number % 5) for number in range(400)]
    result = fit(judged)
    assert (result.num_fitted, result.num_measured) == (200, 200)
    assert result.before.error.num_clusters == 20


def test_the_length_term_takes_the_bias_by_length_out() -> None:
    rng = random.Random(1)
    judged = []
    for number in range(600):
        lengths = [rng.randint(10, 400) for _ in range(2)]
        for length in lengths:
            right = rng.random() < 0.5
            score = min(10.0, max(1.0, (5.0 if right else 2.0) + 2.0 * math.log(length / 60) + rng.gauss(0, 0.5)))
            judged.append(judge_item(score_item(number, 10 if right else 1, text="x" * length), score))
    plain, by_length = fit(judged), fit(judged, by_length=True)
    slope = plain.before.length_slope
    assert slope is not None and plain.after.length_slope is not None and by_length.after.length_slope is not None
    assert slope > 0.15 and plain.after.length_slope > 0.1
    assert abs(by_length.after.length_slope) < 0.03
    assert by_length.after.squared_error < plain.after.squared_error / 2
    assert by_length.calibration.length_slope == pytest.approx(2 / 9, abs=0.06)
    assert plain.calibration.length_slope == 0


def test_a_slope_is_within_prompts() -> None:
    assert find_slope([("a", 1.0, 0.0), ("a", 2.0, 0.5), ("b", 5.0, 0.0), ("b", 6.0, 0.5)]) == pytest.approx(0.5)
    assert find_slope([("a", 1.0, 0.0), ("b", 2.0, 1.0)]) is None


def test_the_threshold_keeps_to_the_wanted_share_of_wrong_responses() -> None:
    said = [0.1, 0.2, 0.3, 0.4, 0.9, 0.9, 0.6, 0.9]
    labels = [0.0, 0, 0, 0, 0, 1, 1, 1]
    points = [Point(asked=n, said=s, label=y) for n, (s, y) in enumerate(zip(said, labels, strict=True))]
    found = find_threshold(points, points, 0.2)
    assert found is not None and found.reward == 0.6
    assert (found.false_positives.mean, found.recall.mean) == (0.2, 1.0)
    assert find_threshold(points, points, 0.1) is None


def test_what_labels_say_decides_what_is_fitted() -> None:
    ranked = RankedResponses(item_id="r", prompt=ask("r"), responses=("a", "b", "c"), grades=(2.0, 1.0, 1.0))
    target, points = collect_points([judge_item(ranked, 9.0, 5.0, None)], POINTWISE)
    assert (target, [(p.said, p.label) for p in points]) == ("better", [(8 / 9, 1.0), (4 / 9, 0.25)])
    mixed = [judge_item(ranked, 9.0, 5.0, 2.0), judge_item(score_item(0, 4, is_yes_no=False), 7.0)]
    target, points = collect_points(mixed, POINTWISE)
    assert target == "score"
    assert [(p.label, p.is_fitted) for p in points] == [(1.0, False), (0.25, False), (0.25, False), (1 / 3, True)]
    assert collect_points(mixed, PAIRWISE)[1] == []  # nothing was compared


def test_a_judge_of_pairs_is_fitted_to_its_votes_in_both_orders() -> None:
    pair = RankedResponses(item_id="r", prompt=ask("r"), responses=("a", "b"), grades=(0.0, 1.0))

    def vote(siblings: tuple[int, int], *scores: float) -> Judgement:
        return Judgement(
            group_id="g", siblings=siblings, scores=scores, prompt_ids=(), completion=SILENT, grm="grm", version=0
        )

    votes = (vote((0, 1), 1, 0), vote((0, 1), 0, 1), vote((1, 0), 1, 0), vote((1, 0), 1, 0))
    reports = (JudgeReport(verdict=make_failure("died", ""), judgements=votes), report_score(1, 5.0))
    target, points = collect_points([JudgedItem(item=pair, reports=reports, num_asked=4)], PAIRWISE)
    assert target == "better"
    assert [(p.said, p.label) for p in points] == [(0.25, 0.0), (0.75, 1.0)]
    one_order = (JudgeReport(verdict=make_failure("died", ""), judgements=votes[:2]), report_score(1, 5.0))
    assert collect_points([JudgedItem(item=pair, reports=one_order, num_asked=4)], PAIRWISE)[1] == []


def test_too_few_labels_and_equal_ones_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"evaluate\.path: .* 15 are to fit and 15, to other prompts, to measure"):
        fit(overconfident(30))
    with pytest.raises(ValueError, match=r"evaluate\.path: .* needs 20 of each, and different labels"):
        fit([judge_item(score_item(number, 10), 5.0 + number % 5) for number in range(80)])
