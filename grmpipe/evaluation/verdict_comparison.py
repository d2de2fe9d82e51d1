"""A run's own verdicts next to those of another judge on the same rollouts: agreement, truth, advantages;
the output of task=rejudge: tables, comparison.json, metrics.
"""

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.evaluation.agreement import compute_spearman
from grmpipe.evaluation.evaluation_files import causes, percent, show_figures, table
from grmpipe.evaluation.intervals import Difference, Estimate, estimate_clustered, estimate_difference
from grmpipe.observe.plain_json import plain
from grmpipe.observe.run_files import FIGURES
from grmpipe.types import Metrics

MIN_SEGMENT = 5  # steps on each side of the step from which two series part
SURE = 5.0  # standard errors of the difference of both sides; the best split of pure noise stays below
MAX_AUTOCORRELATION = 0.97
NUM_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRollout:
    """A rollout that both judged.

    old, new: its reward by the run's verdict and by the new one; None: that verdict failed.
    right:    how right it is by the rule; None without a reference.
    old_advantage, new_advantage: mean over its tokens; None if its group has none, or the estimator needs a critic.
    """

    old: float | None
    new: float | None
    right: float | None = None
    old_advantage: float | None = None
    new_advantage: float | None = None

    @property
    def changes_sign(self) -> bool | None:
        """Whether the new verdicts turn the sign of its advantage; None unless both are known and one isn't zero."""
        old, new = self.old_advantage, self.new_advantage
        if old is None or new is None or old == new == 0:
            return None
        return old * new < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedGroup:
    """The rollouts of one group. step: that trained it; None: none did."""

    group_id: str
    step: int | None
    rollouts: tuple[ComparedRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How the new verdicts agree with the run's own, and both with the truth.

    rank_correlation: Spearman's, within groups: over the groups where both judges tell siblings apart.
    flips:            pairs of siblings that both judges order, and each in another way.
    old_accuracy, new_accuracy: pairs of a right and a less right sibling that the judge orders so; a tie counts half.
    accuracy_difference: the new one minus the old one, paired: on pairs of which both have all verdicts.
    sign_changes:     rollouts whose advantage has the other sign under the new verdicts.
    """

    num_groups: int
    rank_correlation: Estimate
    flips: Estimate
    old_accuracy: Estimate
    new_accuracy: Estimate
    accuracy_difference: Difference
    sign_changes: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """A step of the run. Means over its rollouts, NaN over none."""

    step: int
    old_reward: float
    new_reward: float
    right: float
    agreement: Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictComparison:
    """Both judges on all groups, and step by step.

    parts_from_truth:     the step from which the run's reward and the truth part (see `find_parting_step`).
    parts_from_new_judge: the step from which it parts with the reward of the new judge.
    """

    num_rollouts: int
    num_compared: int  # those of them with a verdict of both judges
    overall: Agreement
    steps: tuple[StepComparison, ...]
    parts_from_truth: int | None
    parts_from_new_judge: int | None


def compare(groups: Sequence[ComparedGroup]) -> VerdictComparison:
    by_step: defaultdict[int, list[ComparedGroup]] = defaultdict(list)
    for group in groups:
        if group.step is not None:
            by_step[group.step].append(group)
    steps = tuple(compare_step(step, by_step[step]) for step in sorted(by_step))
    numbers, old = [one.step for one in steps], [one.old_reward for one in steps]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return VerdictComparison(
        num_rollouts=len(rollouts),
        num_compared=sum(one.old is not None and one.new is not None for one in rollouts),
        overall=agreement(groups),
        steps=steps,
        parts_from_truth=find_parting_step(numbers, old, [one.right for one in steps]),
        parts_from_new_judge=find_parting_step(numbers, old, [one.new_reward for one in steps]),
    )


def compare_step(step: int, groups: Sequence[ComparedGroup]) -> StepComparison:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return StepComparison(
        step=step,
        old_reward=mean(one.old for one in rollouts),
        new_reward=mean(one.new for one in rollouts),
        right=mean(one.right for one in rollouts),
        agreement=agreement(groups),
    )


def agreement(groups: Sequence[ComparedGroup]) -> Agreement:
    def over_groups(values_in: Callable[[ComparedGroup], Sequence[float]]) -> Estimate:
        return estimate_clustered({group.group_id: values for group in groups if (values := values_in(group))})

    return Agreement(
        num_groups=len(groups),
        rank_correlation=over_groups(rank_correlation),
        flips=over_groups(flips),
        old_accuracy=over_groups(lambda group: right_orders(group, [one.old for one in group.rollouts])),
        new_accuracy=over_groups(lambda group: right_orders(group, [one.new for one in group.rollouts])),
        accuracy_difference=estimate_difference(
            {group.group_id: values for group in groups if (values := order_differences(group))}, are_shares=True
        ),
        sign_changes=over_groups(
            lambda group: [float(one.changes_sign) for one in group.rollouts if one.changes_sign is not None]
        ),
    )


# -- of a group ------------------------------------------------------------------------------------------------------


def pair_rewards(group: ComparedGroup) -> list[tuple[float, float]]:
    """(old, new) rewards."""
    return [(one.old, one.new) for one in group.rollouts if one.old is not None and one.new is not None]


def rank_correlation(group: ComparedGroup) -> Sequence[float]:
    """Spearman's rank correlation of the siblings' rewards, ties with their mean rank; none if a judge sees no
    difference.
    """
    old, new = zip(*pair_rewards(group), strict=True) if pair_rewards(group) else ((), ())
    found = compute_spearman(old, new)
    return () if math.isnan(found) else (found,)


def flips(group: ComparedGroup) -> list[float]:
    """For each pair of siblings that both judges order: 1 if they disagree, else 0."""
    pairs = itertools.combinations(pair_rewards(group), 2)
    products = [(one[0] - other[0]) * (one[1] - other[1]) for one, other in pairs]
    return [float(product < 0) for product in products if product != 0]


def right_orders(group: ComparedGroup, rewards: Sequence[float | None]) -> list[float]:
    """For each pair of a right and a less right sibling: 1 if the rewards order them so, 1/2 if they are equal."""
    known = [
        (one.right, reward)
        for one, reward in zip(group.rollouts, rewards, strict=True)
        if one.right is not None and reward is not None
    ]
    signs = [
        (right - other_right) * (reward - other_reward)
        for (right, reward), (other_right, other_reward) in itertools.combinations(known, 2)
        if right != other_right
    ]
    return [0.5 if sign == 0 else float(sign > 0) for sign in signs]


def order_differences(group: ComparedGroup) -> list[float]:
    """For each such pair with all verdicts of both judges: how much better the new one orders it."""
    old = [None if one.new is None else one.old for one in group.rollouts]
    new = [None if one.old is None else one.new for one in group.rollouts]
    pairs = zip(right_orders(group, new), right_orders(group, old), strict=True)
    return [after - before for after, before in pairs]


def mean(values: Iterable[float | None]) -> float:
    """The mean of what is known; NaN of nothing."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else math.nan


# -- where two series part -------------------------------------------------------------------------------------------


def find_parting_step(steps: Sequence[int], reward: Sequence[float], reference: Sequence[float]) -> int | None:
    """The step from which a reward rises and its reference doesn't; None if there is none.

    Both series are in standard deviations, so that their scales don't matter. The step is the split that explains most
    of the variance of their difference by two levels (least squares). It counts if the later level is above the
    earlier one by SURE standard errors, and the reference has not risen.
    """
    known = [
        (step, one, other)
        for step, one, other in zip(steps, reward, reference, strict=True)
        if math.isfinite(one) and math.isfinite(other)
    ]
    if len(known) < 2 * MIN_SEGMENT:
        return None
    numbers, rewards, references = zip(*known, strict=True)
    gaps = [one - other for one, other in zip(standardize(rewards), standardize(references), strict=True)]
    sums, squares = ([0.0, *itertools.accumulate(values)] for values in (gaps, [gap**2 for gap in gaps]))

    def scatter(start: int, end: int) -> float:
        """The sum of squared distances from the mean."""
        return squares[end] - squares[start] - (sums[end] - sums[start]) ** 2 / (end - start)

    splits = range(MIN_SEGMENT, len(gaps) - MIN_SEGMENT + 1)
    split = min(splits, key=lambda at: scatter(0, at) + scatter(at, len(gaps)))
    rises = statistics.fmean(rewards[split:]) > statistics.fmean(rewards[:split])
    follows = statistics.fmean(references[split:]) > statistics.fmean(references[:split])
    parts = is_sure(gaps[:split], gaps[split:]) or any(drifts(gaps[len(gaps) * k // 4 :]) for k in range(3))
    return numbers[split] if rises and not follows and parts else None


def standardize(values: Sequence[float]) -> list[float]:
    spread = statistics.pstdev(values) or 1.0
    return [(value - statistics.fmean(values)) / spread for value in values]


def is_sure(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the mean has risen by more than SURE standard errors.

    A step is near the one before it, and two series that only wander part by chance. So the squared error grows by
    (1 + r) / (1 - r), with the autocorrelation r of neighbouring steps on each side (Bayley and Hammersley 1946), which
    short series show too low by (1 + 3r) / n (Kendall 1954).
    """
    sides = [[value - statistics.fmean(side) for value in side] for side in (before, after)]
    count, total = len(before) + len(after), math.fsum(value**2 for side in sides for value in side)
    found = math.fsum(one * other for side in sides for one, other in itertools.pairwise(side)) / (total or 1.0)
    found = min(MAX_AUTOCORRELATION, max(0.0, found + 2 * (1 + 3 * found) / count))  # a side has half of the steps
    square_error = math.fsum(math.fsum(value**2 for value in side) / len(side) / (len(side) - 1) for side in sides)
    rise = statistics.fmean(after) - statistics.fmean(before)
    return rise > SURE * math.sqrt(square_error * (1 + found) / (1 - found))


def drifts(values: Sequence[float]) -> bool:
    """Whether the means of NUM_BLOCKS successive blocks rise evenly, by SURE standard errors of their rises: what only
    wanders doesn't.
    """
    if len(values) < 2 * NUM_BLOCKS:
        return False
    ends = [len(values) * number // NUM_BLOCKS for number in range(NUM_BLOCKS + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(ends)]
    rises = [after - before for before, after in itertools.pairwise(means)]
    return statistics.fmean(rises) > SURE * statistics.stdev(rises) / math.sqrt(len(rises))


# -- the output --------------------------------------------------------------------------------------------------------


COMPARISON = "comparison.json"
MAX_ROWS = 25  # in the table of steps
FIGURES_SHOWN = {
    "rank_correlation": "rank correlation within groups",
    "flips": "pairs of siblings in another order",
    "old_accuracy": "right order by the rule: the run's judge",
    "new_accuracy": "right order by the rule: the new judge",
    "sign_changes": "advantages with another sign",
}


def write_comparison(run_dir: Path, result: VerdictComparison) -> None:
    (run_dir / COMPARISON).write_text(json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n", "utf-8")


def list_metrics(result: VerdictComparison) -> Metrics:
    """The figures by their names in summary.json; none that isn't known."""
    difference = result.overall.accuracy_difference
    metrics: Metrics = {"accuracy_difference": difference.mean, "accuracy_difference_low": difference.low}
    metrics |= {"accuracy_difference_high": difference.high, "accuracy_difference_p": difference.p}
    for name in FIGURES_SHOWN:
        estimate: Estimate = getattr(result.overall, name)
        metrics |= {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    for name, step in (
        ("parts_from_truth", result.parts_from_truth), ("parts_from_new_judge", result.parts_from_new_judge),
    ):  # fmt: skip
        metrics[name] = math.nan if step is None else float(step)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def show_comparison(
    run_dir: Path, result: VerdictComparison, failed: Mapping[str, int], more_notes: Sequence[str]
) -> None:
    """Print the tables. failed: rollouts without a new verdict, by cause."""
    (run_dir / FIGURES).unlink(missing_ok=True)  # of a comparison here before
    figures = [(words, estimate_cells(getattr(result.overall, name))) for name, words in FIGURES_SHOWN.items()]
    tables = [table("figure", "the new verdicts next to the run's own", ("mean", "95 %", "groups"), figures)]
    if result.steps:
        heads = ("reward", "new", "right", "correlation", "flips", "order", "new", "signs")
        rows = [(str(one.step), step_cells(one)) for one in spread_out(result.steps)]
        title = "by step: reward, by the rule; flips, right order, changed signs in percent; new: of the new judge"
        tables.append(table("step", title, heads, rows))
    show_figures(run_dir, tables, [*notes_on(result, failed), *more_notes])


def spread_out(steps: Sequence[StepComparison]) -> list[StepComparison]:
    """At most MAX_ROWS steps, the first and the last among them."""
    every = -(-len(steps) // MAX_ROWS)
    return [one for index, one in enumerate(steps) if index % every == 0 or one is steps[-1]]


def estimate_cells(estimate: Estimate) -> Iterator[str]:
    yield number(estimate.mean)
    yield "-" if math.isnan(estimate.low) else f"{estimate.low:.2f} to {estimate.high:.2f}"
    yield str(estimate.num_clusters)


def step_cells(one: StepComparison) -> Iterator[str]:
    yield from map(number, (one.old_reward, one.new_reward, one.right))
    within: Agreement = one.agreement
    yield number(within.rank_correlation.mean)
    shares = (within.flips, within.old_accuracy, within.new_accuracy, within.sign_changes)
    yield from (percent(share.mean) for share in shares)


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def notes_on(result: VerdictComparison, failed: Mapping[str, int]) -> Iterator[str]:
    yield f"rollouts: {result.num_rollouts}, with a verdict of both judges {result.num_compared}"
    if failed:
        yield f"without a new verdict: {sum(failed.values())}{causes(failed)}; they are left out, and count as nothing"
    if (difference := result.overall.accuracy_difference).num_values:
        yield (
            f"the new judge minus the run's, right order by the rule, paired: {100 * difference.mean:+.1f} points, "
            f"95 % {100 * difference.low:+.1f} to {100 * difference.high:+.1f}, p {difference.p:.3f}"
        )
    for who, step in (("the truth", result.parts_from_truth), ("the new judge", result.parts_from_new_judge)):
        yield describe_parting(who, step)
    if not result.overall.sign_changes.num_clusters:
        yield "advantages: not compared; no judged group was trained on, or the estimator needs a critic"
    yield f"all steps, with intervals: {COMPARISON}"


def describe_parting(who: str, step: int | None) -> str:
    if step is None:
        return f"the run's reward and {who}: no step from which only the reward rises"
    return f"the run's reward and {who} part from step {step} on: only the reward rises"
