"""Fits the calibration of a judge to labels, and measures it on prompts that it was not fitted to. Pure.

Isotonic regression, as a calibration: Zadrozny and Elkan 2002; it was read in scikit-learn 1.5's sklearn/isotonic.py.
Against Platt's sigmoid on simulated judges it is about as good from 100 responses on, and better where the curve isn't
a sigmoid.
"""

import math
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.task_settings import CalibrateConfig
from grmpipe.data.prompts import identify_prompt
from grmpipe.evaluation.agreement import fit_isotonic
from grmpipe.evaluation.intervals import Estimate, estimate_clustered
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.judge.calibration import Calibration, compute_log_length
from grmpipe.judge.protocols.pairwise import read_votes, vote_share
from grmpipe.judge.votes import LOST, TIED, WON
from grmpipe.models.seeds import derive_seed
from grmpipe.types import Judgement, Labelled, ScoredResponse, Verdict

Target = Literal["score", "right", "better"]
FEWEST = 20  # responses in each half
NUM_BINS = 15  # of equal width, for the expected calibration error (Guo et al. 2017, arXiv 1706.04599)
SLOPES = np.linspace(-1.5, 1.5, 121)  # tried, in rewards per standard deviation of log lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a judge said of a response, or of a pair, and what its label says. Both from 0 to 1.

    is_fitted: whether the map is fitted to such labels; the others show only the bias by length.
    """

    asked: Hashable  # the prompt
    said: float
    label: float
    log_length: float = 0.0
    is_fitted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Rewards in a bin: how many, their mean, and that of their labels."""

    count: int
    reward: float
    label: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How well rewards agree with labels.

    error:         the expected calibration error: the mean distance of the rewards of a bin from their labels.
    squared_error: the mean squared distance of each reward from its label (the Brier score, for right and wrong).
    length_slope:  what one unit of log length adds to a reward, within the responses to a prompt; None without such.
    """

    error: Estimate
    squared_error: float
    length_slope: float | None
    curve: tuple[ReliabilityBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The lowest reward from which on at most a wanted share of wrong responses passes, where the map was fitted; the
    shares of wrong and of right responses that pass on the other half.
    """

    reward: float
    false_positives: Estimate
    recall: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A calibration and what was measured on the half of the prompts that it was not fitted to.

    num_failed:  responses without a verdict. num_other: those whose labels are of another kind.
    label_slope: like `length_slope`, of the labels: what length is worth.
    threshold:   None without labels of right and wrong, or if even the highest reward lets too many pass.
    """

    calibration: Calibration
    num_fitted: int
    num_measured: int
    num_failed: int
    num_other: int
    before: Reliability
    after: Reliability
    label_slope: float | None
    threshold: Threshold | None


def fit_calibration(
    judged: Sequence[JudgedItem], judge: JudgeConfig, described: Mapping[str, str], settings: CalibrateConfig, seed: int
) -> CalibrationResult:
    """Fit half of the prompts, measure the other. described: the judge (`describe_judge`). Raises ValueError."""
    target, points = collect_points(judged, judge)
    fit, measure = split_by_prompt(points, seed)
    fitted, measured = ([point for point in half if point.is_fitted] for half in (fit, measure))
    if min(len(fitted), len(measured)) < FEWEST or len({point.label for point in fitted}) == 1:
        raise ValueError(
            f"evaluate.path: of responses with a label and a verdict {len(fitted)} are to fit and {len(measured)}, to "
            f"other prompts, to measure; a calibration needs {FEWEST} of each, and different labels; label more"
        )
    calibration = fit_map(fitted, target, described, settings.length)
    calibrated = apply_map(calibration, measured)
    return CalibrationResult(
        calibration=calibration,
        num_fitted=len(fitted),
        num_measured=len(measured),
        num_failed=sum(not isinstance(report.verdict, Verdict) for one in judged for report in one.reports),
        num_other=len(points) - sum(point.is_fitted for point in points),
        before=measure_reliability(measured, measure),
        after=measure_reliability(calibrated, apply_map(calibration, measure)),
        label_slope=find_slope((point.asked, point.log_length, point.label) for point in measure),
        threshold=find_threshold(apply_map(calibration, fitted), calibrated, settings.false_positive_rate),
    )


# -- labels ----------------------------------------------------------------------------------------------------------


def collect_points(judged: Sequence[JudgedItem], judge: JudgeConfig) -> tuple[Target, list[Point]]:
    """What is fitted: labels of single responses if the judge takes these and there are some, else which response is
    better.
    """
    if judge.compares_pairs:
        return "better", [point for one in judged for point in list_pair_points(one, judge.scale_of_margins)]
    compares = judge.kind == "generative" and judge.protocol_kind.compares
    single = [one.item for one in judged if isinstance(one.item, ScoredResponse) and not compares]
    points = [
        Point(
            asked=identify_prompt(one.item.prompt),
            said=report.verdict.outcome,
            label=label,
            log_length=compute_log_length(text),
            is_fitted=bool(single) == isinstance(one.item, ScoredResponse),
        )
        for one in judged
        for report, label, text in zip(one.reports, read_labels(one.item, judge.scale), one.item.responses, strict=True)
        if isinstance(report.verdict, Verdict)
    ]
    if not single:
        return "better", points
    return "right" if all(item.is_yes_no for item in single) else "score", points


def read_labels(item: Labelled, scale: Scale) -> list[float]:
    """A label from 0 to 1 per response: its score's share of the scale, or the share of the others that it is better
    than; ties count half.
    """
    if isinstance(item, ScoredResponse):
        return [scale.to_reward(item.score)]
    others = len(item.grades) - 1
    return [
        (sum(judge_pair(grade, other) for other in item.grades) - TIED) / others for grade in item.grades
    ]  # less the tie with itself


def judge_pair(grade: float, other: float) -> float:
    return WON if grade > other else TIED if grade == other else LOST


def list_pair_points(one: JudgedItem, scale: Scale | None) -> Iterator[Point]:
    """Both responses of each pair that was judged in both orders. scale: see read_vote."""
    if isinstance(one.item, ScoredResponse):
        return
    pairs: defaultdict[tuple[int, ...], list[Judgement]] = defaultdict(list)
    for judgement in one.judgements:
        pairs[tuple(sorted(judgement.siblings))].append(judgement)
    for (lower, higher), judgements in pairs.items():
        if all(votes := read_votes(judgements, lower, scale)):
            said, label = vote_share(votes), judge_pair(one.item.grades[lower], one.item.grades[higher])
            for place in (said, label), (WON - said, WON - label):
                yield Point(asked=identify_prompt(one.item.prompt), said=place[0], label=place[1])


def split_by_prompt(points: Sequence[Point], seed: int) -> tuple[list[Point], list[Point]]:
    """Two halves that share no prompt."""
    prompts = sorted({point.asked for point in points}, key=repr)
    random.Random(derive_seed(seed, "calibrate")).shuffle(prompts)
    first = set(prompts[: len(prompts) // 2])
    return [point for point in points if point.asked in first], [point for point in points if point.asked not in first]


# -- the map ---------------------------------------------------------------------------------------------------------


def fit_map(points: Sequence[Point], target: Target, described: Mapping[str, str], by_length: bool) -> Calibration:
    """The monotone map with the smallest squared error; by_length: over all slopes of a length term too."""
    said, labels, lengths = np.array([(point.said, point.label, point.log_length) for point in points]).T
    mean, spread = float(lengths.mean()), float(lengths.std())
    best: tuple[float, float] = (math.inf, 0.0)
    for slope in SLOPES / spread if by_length and spread > 0 else [0.0]:
        index = said - slope * (lengths - mean)
        error = float(np.mean((np.interp(index, *fit_isotonic(index, labels)) - labels) ** 2))
        best = min(best, (error, float(slope)), key=lambda one: (one[0], abs(one[1])))
    knots, rewards = fit_isotonic(said - best[1] * (lengths - mean), labels)
    return Calibration(
        judge=dict(described),
        target=target,
        said=tuple(knots),
        rewards=tuple(rewards),
        length_slope=best[1],
        length_mean=mean,
    )


def apply_map(calibration: Calibration, points: Sequence[Point]) -> list[Point]:
    return [replace(point, said=calibration.to_reward(point.said, point.log_length)) for point in points]


# -- figures ---------------------------------------------------------------------------------------------------------


def measure_reliability(points: Sequence[Point], all_points: Sequence[Point]) -> Reliability:
    """all_points: also those with labels of another kind, for the bias by length."""
    bins: defaultdict[int, list[Point]] = defaultdict(list)
    for point in points:
        bins[min(NUM_BINS - 1, max(0, int(point.said * NUM_BINS)))].append(point)
    distances: defaultdict[Hashable, list[float]] = defaultdict(list)
    curve = []
    for _, own in sorted(bins.items()):
        found = ReliabilityBin(
            count=len(own), reward=fmean(one.said for one in own), label=fmean(one.label for one in own)
        )
        curve.append(found)
        sign = math.copysign(1.0, found.reward - found.label)
        for one in own:
            distances[one.asked].append(sign * (one.said - one.label))
    return Reliability(
        error=estimate_clustered(distances),
        squared_error=fmean((point.said - point.label) ** 2 for point in points),
        length_slope=find_slope((point.asked, point.log_length, point.said) for point in all_points),
        curve=tuple(curve),
    )


def find_slope(responses: Iterable[tuple[Hashable, float, float]]) -> float | None:
    """The slope of a value by log length within the responses to a prompt (prompt, log length, value). None if no
    prompt has responses of different lengths.
    """
    by_prompt: defaultdict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for asked, length, value in responses:
        by_prompt[asked].append((length, value))
    product = square = 0.0
    for own in by_prompt.values():
        mean_length, mean_value = fmean(length for length, _ in own), fmean(value for _, value in own)
        product += math.fsum((length - mean_length) * (value - mean_value) for length, value in own)
        square += math.fsum((length - mean_length) ** 2 for length, _ in own)
    return product / square if square > 0 else None


def find_threshold(fitted: Sequence[Point], measured: Sequence[Point], rate: float) -> Threshold | None:
    """Both with calibrated rewards. rate: the largest share of wrong responses that may pass."""
    if not {point.label for point in fitted} <= {WON, LOST}:
        return None
    wrong = [point.said for point in fitted if not point.label]
    for reward in sorted({point.said for point in fitted}):
        if sum(said >= reward for said in wrong) <= rate * len(wrong):
            return Threshold(
                reward=reward,
                false_positives=estimate_passing(measured, reward, LOST),
                recall=estimate_passing(measured, reward, WON),
            )
    return None


def estimate_passing(points: Sequence[Point], threshold: float, label: float) -> Estimate:
    passes: defaultdict[Hashable, list[float]] = defaultdict(list)
    for point in points:
        if point.label == label:
            passes[point.asked].append(float(point.said >= threshold))
    return estimate_clustered(passes)
