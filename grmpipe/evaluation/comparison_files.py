"""The output of task=rejudge: tables, comparison.json, metrics."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grmpipe.evaluation.evaluation_files import causes, percent, show_figures, table
from grmpipe.evaluation.intervals import Estimate
from grmpipe.evaluation.verdict_comparison import Agreement, StepComparison, VerdictComparison
from grmpipe.observe.plain_json import plain
from grmpipe.observe.run_files import FIGURES
from grmpipe.types import Metrics

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
