"""The output of task=evaluate: a table, evaluation.json, judged.jsonl."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import MINIMAL
from rich.console import Console
from rich.table import Table

from grmpipe.config.judge import Scale
from grmpipe.config.keys.secrets import environment_secrets, mask
from grmpipe.evaluation.intervals import Difference, Estimate
from grmpipe.evaluation.judge_accuracy import Accuracy, JudgeEvaluation, SubsetResult
from grmpipe.evaluation.judge_comparison import JudgeComparison
from grmpipe.evaluation.judged_items import JudgedItem, decide_outcome
from grmpipe.observe.plain_json import plain
from grmpipe.observe.records import encode, of_judge
from grmpipe.observe.run_files import FIGURES, JUDGED
from grmpipe.types import Failed

JUDGE_RESULTS = "evaluation.json"
WIDTH = 400  # columns, more than any table has
TOGETHER = "together"  # what a composition makes of its judges
SHOWN_APART = 3  # items that two judges part on
MAX_CHARS = 60  # of a question
# Figures that aren't shares, and so aren't in percent.
CORRELATIONS = ("spearman", "kendall_tau", "quadratic_kappa", "score_error", "mapped_error")
FIGURES_IN_WORDS = {
    "rated_accuracy": "right, of several raters' items",
    "pair_accuracy": "pairs in the right order",
    "tied_alike": "ties that have equal scores",
    "both_orders_accuracy": "pairs right in both orders",
    "consistency": "pairs alike in both orders",
    "spearman": "Spearman",
    "kendall_tau": "Kendall tau-b",
    "quadratic_kappa": "quadratic weighted kappa",
    "score_error": "distance from the label",
    "mapped_error": "the same, best monotone map",
    "precision": "precision",
    "recall": "recall",
    "false_positive_rate": "false positives of all no",
    "auc": "AUC",
    "ties": "RewardBench 2's Ties",
}
TableRow = tuple[str, Iterable[str]]  # its name, and its cells


def write_files(
    run_dir: Path,
    judged: Sequence[JudgedItem],
    result: JudgeEvaluation,
    scale: Scale,
    scales: Mapping[str, Scale],
    pass_score: float,
) -> None:
    """Write the files (see write_judged)."""
    (run_dir / JUDGE_RESULTS).write_text(json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n", "utf-8")
    write_judged(run_dir, judged, scale, scales, pass_score)


def write_judged(
    run_dir: Path, judged: Sequence[JudgedItem], scale: Scale, scales: Mapping[str, Scale], pass_score: float
) -> None:
    """scale: the labels'. scales: those of the judges' own scores, by name. pass_score: the lowest score that means
    yes.
    """
    lines = (json.dumps(plain(to_line(one, scale, scales, pass_score)), ensure_ascii=False) + "\n" for one in judged)
    (run_dir / JUDGED).write_text("".join(lines), "utf-8")


def to_line(one: JudgedItem, scale: Scale, scales: Mapping[str, Scale], pass_score: float) -> dict[str, object]:
    """With several judges every judgement and failure says whose it is, and `by_judge` has the scores of each on its
    own scale. labels: one per response; where responses are ranked, 1 for the best, 0 for the others. What a server
    said of a failure may hold a secret.
    """
    secrets = environment_secrets()
    reports = [
        (sibling, name, own) for sibling, report in enumerate(one.reports) for name, own in report.own_reports.items()
    ]
    by_judge = {name: describe_verdicts(one.by(name), scale, scales[name], pass_score) for name in one.judges}
    return {
        "item_id": one.item.item_id,
        "subset": one.item.subset,
        "prompt": encode(one.item.prompt),
        "responses": one.item.responses,
        "labels": one.item.labels,
        **describe_verdicts(one, scale, scale, pass_score),
        **({"by_judge": by_judge} if by_judge else {}),
        "judgements": [
            {
                **of_judge(name),
                "siblings": said.siblings,
                "scores": said.scores,
                "text": said.completion.text,
                **({"criteria": said.criteria} if said.criteria else {}),
            }
            for _, name, own in reports
            for said in own.judgements
        ],
        "failures": [
            {**of_judge(name), "sibling": sibling, "cause": failure.cause, "detail": mask(failure.detail, secrets)}
            for sibling, name, own in reports
            for failure in own.failures
        ],
    }


def describe_verdicts(one: JudgedItem, scale: Scale, own: Scale, pass_score: float) -> dict[str, object]:
    """The outcome by the labels' scale, the scores on the judge's own."""
    return {
        "outcome": decide_outcome(one.item, one.verdict_scores(scale), pass_score),
        "scores": one.verdict_scores(own),
        "failed": {i: r.verdict.cause for i, r in enumerate(one.reports) if isinstance(r.verdict, Failed)},
    }


# -- the table -----------------------------------------------------------------------------------------------------


def show(result: JudgeEvaluation, max_subsets: int, run_dir: Path) -> None:
    """Show the results. max_subsets: subsets sampled for each smaller k."""
    tables = [make_table(result)]
    tables += [make_meta_rm_table(result)] if result.overall.with_meta_rm else []
    tables += [make_parts_table(result)] if result.parts else []
    tables += [make_judges_table(result)] if result.by_judge else []
    tables += [make_figures_table(result)] if result.figures else []
    tables += [make_comparison_table(result.comparisons)] if result.comparisons else []
    show_figures(run_dir, tables, notes_on(result, max_subsets))


def show_figures(run_dir: Path, tables: Sequence[Table], notes: Iterable[str]) -> None:
    """Print tables as wide as they are: no number is cut off, whatever the width of the terminal. Then notes. The
    report shows the same text.
    """
    console = Console(width=WIDTH, record=True)
    for one in tables:
        console.print(one)
    for line in notes:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    lines = (line.rstrip() for line in console.export_text().splitlines())
    with (run_dir / FIGURES).open("a", encoding="utf-8") as figures:  # a judge's, then a policy's
        figures.write("\n".join(lines) + "\n")


def make_table(result: JudgeEvaluation) -> Table:
    heads = ("items", "judged", "95 %", *(f"k={k}" for k in result.overall.by_k), "tied", "failed")
    return by_subset(result, "right, in percent of all items: failed and tied ones count as wrong", heads, format_cells)


def make_meta_rm_table(result: JudgeEvaluation) -> Table:
    """The table with the meta-RM, separate because both together don't fit 80 columns."""
    heads = ("items", *(f"meta_rm@{k}" for k in result.overall.with_meta_rm))
    return by_subset(result, "the same, by the better half of each vote", heads, format_meta_rm_cells)


def make_judges_table(result: JudgeEvaluation) -> Table:
    """The table of several judges: each by itself, and what a composition makes of them."""
    heads = ("items", "judged", "95 %", "tied", "failed", "judgements", "lost", "tokens")
    rows = [(name, format_judge_cells(own)) for name, own in result.by_judge.items()]
    total = (TOGETHER, format_judge_cells(result)) if is_composed(result) else None
    return table("judge", "the same, judge by judge", heads, rows, total)


def is_composed(result: JudgeEvaluation) -> bool:
    """Whether the whole is made of several judges: else it is the first of single ones."""
    return all(own.figures is not result.figures for own in result.by_judge.values())


def make_parts_table(result: JudgeEvaluation) -> Table:
    rows = [
        (f"{trait}: {name}", format_accuracy_cells(part))
        for trait, parts in result.parts.items()
        for name, part in parts.items()
    ]
    return table("part", "the same, by what items have in common", ("items", "judged", "95 %", "tied", "failed"), rows)


def make_figures_table(result: JudgeEvaluation) -> Table:
    """What else the labels tell, of each judge, and of people where items have several raters."""
    columns = {name: own.figures for name, own in result.by_judge.items()} or {"judge": result.figures}
    columns |= {TOGETHER: result.figures} if result.by_judge and is_composed(result) else {}
    columns |= {"people": result.people} if result.people else {}
    names = [name for name in FIGURES_IN_WORDS if any(name in own for own in columns.values())]
    rows = [
        (FIGURES_IN_WORDS[name], [cell for own in columns.values() for cell in format_estimate(name, own.get(name))])
        for name in names
    ]
    heads = [head for name in columns for head in (name, "95 %")]
    return table("figure", "against the labels, shares in percent", heads, rows)


def make_comparison_table(comparisons: Sequence[JudgeComparison]) -> Table:
    """Paired by item: how much better a judge is than another one, and at what price."""
    heads = ["items", "right", "95 %", "p"]
    heads += ["false positives", "95 %", "p"] if any(one.false_positives is not None for one in comparisons) else []
    heads += ["error", "95 %", "p"] if any(one.score_error is not None for one in comparisons) else []
    heads += ["tokens", "seconds", *(["USD"] if any(one.cost_usd is not None for one in comparisons) else [])]
    rows = [(f"{one.judge} - {one.against}", format_comparison_cells(one, heads)) for one in comparisons]
    return table("difference", "paired by item; shares in points, costs: of both, per item", heads, rows)


def by_subset(
    result: JudgeEvaluation, title: str, heads: Sequence[str], cells: Callable[[SubsetResult], Iterator[str]]
) -> Table:
    sections = [(f"= {name}", section) for name, section in result.sections.items()]
    items = [("all items", result.over_items)] if sections else []
    rows = [(name, cells(subset)) for name, subset in [*result.subsets.items(), *sections, *items]]
    return table("subset", title, heads, rows, ("overall", cells(result.overall)))


def table(
    first_head: str, title: str, heads: Sequence[str], rows: Sequence[TableRow], total: TableRow | None = None
) -> Table:
    """A table. total: the row of all others together, after a line."""
    drawn = Table(title=title, box=MINIMAL, padding=0)
    drawn.add_column(first_head, no_wrap=True)
    for head in heads:
        drawn.add_column(head, justify="right", no_wrap=True)
    for name, cells in rows:
        drawn.add_row(name, *cells)
    if total is not None:
        drawn.add_section()
        drawn.add_row(total[0], *total[1])
    return drawn


def format_judge_cells(result: JudgeEvaluation) -> Iterator[str]:
    yield from format_cells(replace(result.overall, by_k={}))
    yield str(result.num_judgements)
    yield str(sum(result.failed_judgements.values()))
    yield str(result.num_tokens)


def format_cells(subset: SubsetResult) -> Iterator[str]:
    yield from format_accuracy_cells(subset.judged, [one.accuracy for one in subset.by_k.values()])


def format_accuracy_cells(judged: Accuracy, by_k: Sequence[float] = ()) -> Iterator[str]:
    yield str(judged.num_items)
    yield percent(judged.accuracy)
    yield interval(judged.low, judged.high)
    yield from map(percent, (*by_k, judged.tied_share, judged.failed_share))


def format_estimate(name: str, estimate: Estimate | None) -> tuple[str, str]:
    if estimate is None:
        return "", ""
    if name not in CORRELATIONS:
        return percent(estimate.mean), interval(estimate.low, estimate.high)
    ends = "-" if math.isnan(estimate.low) else f"{estimate.low:.2f} to {estimate.high:.2f}"
    return "-" if math.isnan(estimate.mean) else f"{estimate.mean:.2f}", ends


def format_comparison_cells(one: JudgeComparison, heads: Sequence[str]) -> Iterator[str]:
    yield str(one.num_items)
    yield from format_difference(one.accuracy, 100, 1)
    if "false positives" in heads:
        yield from ("", "", "") if one.false_positives is None else format_difference(one.false_positives, 100, 1)
    if "error" in heads:
        yield from ("", "", "") if one.score_error is None else format_difference(one.score_error, 1, 2)
    costs = [(one.tokens, one.against_tokens), (one.seconds, one.against_seconds), (one.cost_usd, one.against_cost_usd)]
    for pair in costs if "USD" in heads else costs[:2]:
        yield ", ".join("-" if cost is None else f"{cost:.3g}" for cost in pair)


def format_difference(found: Difference, unit: float, digits: int) -> tuple[str, str, str]:
    if math.isnan(found.mean):
        return "-", "-", "-"
    low, high = (f"{unit * end:+.{digits}f}" for end in (found.low, found.high))
    p = "-" if math.isnan(found.p) else "<.001" if found.p < 0.001 else f"{found.p:.3f}".lstrip("0") or "0"
    return f"{unit * found.mean:+.{digits}f}", f"{low} to {high}", p


def format_meta_rm_cells(subset: SubsetResult) -> Iterator[str]:
    yield str(subset.judged.num_items)
    yield from (percent(one.accuracy) for one in subset.with_meta_rm.values())


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def interval(low: float, high: float) -> str:
    return "-" if math.isnan(low) else f"{100 * low:.0f}-{100 * high:.0f}"


def notes_on(result: JudgeEvaluation, max_subsets: int) -> Iterator[str]:
    """Notes on what the table leaves out, one per line."""
    yield (
        "judged: by the judge's own verdicts, with its 95 % interval over prompts (items of one prompt count as one); "
        "a single response must get its label, a yes or no be on the same side of data.labels.pass_score"
    )
    yield f"overall: the mean over {result.mean_over}"
    num_failed = sum(result.failed_judgements.values())
    if result.num_judgements:
        yield f"judgements: {result.num_judgements} asked, {num_failed} failed{causes(result.failed_judgements)}"
    if result.asked_verdicts:
        yield (
            f"judgements without a verdict that were asked for it: {result.asked_verdicts}, of which "
            f"{result.asked_verdicts_read} then had one"
        )
    if result.tool_calls:
        yield f"calls of tools: {result.tool_calls}, in {result.called_tools} judgements"
    for name, own in result.by_judge.items():
        if own.failed_judgements:
            yield f"  by {name}{causes(own.failed_judgements)}"
    if result.by_judge:
        yield (
            "judge by judge: right counts only items where it judged every response; a cascade, a gate or a route "
            "leaves some out. Judgements and tokens include all that it gave"
        )
    if result.failed_items:
        yield f"items without a verdict{causes(result.failed_items)}; they count as wrong"
    if result.num_ties:
        yield f"items whose labels are all equal: {result.num_ties}; they have no right answer, and are in no accuracy"
    if result.lost_items:
        yield f"items that the judge could not be asked about{causes(result.lost_items)}; they are in no figure"
    if result.tokens_by_k:
        yield f"tokens sampled per item: {costs(result.tokens_by_k)}"
        prompts = costs(result.prompt_tokens_by_k) or "not known here, the model returns no token ids"
        yield f"tokens of prompts per item: {prompts}"
        yield f"smaller k: subsets of the same judgements, all or {max_subsets} drawn, with a new vote"
    if result.seconds is not None:
        cost = "" if result.cost_usd is None else f"; {result.cost_usd:.4g} USD"
        yield f"seconds for all items: {result.seconds:.1f}{cost}"
    if result.people:
        yield "people: each rater against the label that the other raters of the item give"
    for one in result.comparisons:
        yield from describe_parting(one)
    names = {
        "score_length_correlation": "score and length (characters), within a prompt: correlation",
        "label_length_correlation": "label and length, in the data: correlation",
        "first_place_share": "the first one shown wins: share of comparing judgements",
        "ties_share": "no single winner: share of comparing judgements",
        "order_flips_share": "two judgements disagree, the two responses shown in the other order: share",
        "noise_flips_share": "two judgements disagree, shown in the same order (sampling noise): share",
    }
    for name, description in names.items():
        if name in result.bias:
            yield f"{description} {result.bias[name]:.2f}"
    if "order_flips_share" not in result.bias and num_failed < result.num_judgements:
        yield "order flips: not measured, this judge doesn't compare two responses in both orders"


def describe_parting(one: JudgeComparison) -> Iterator[str]:
    """The items that only one of two judges has right: how many, and the first ones."""
    if not one.num_items:
        yield f"{one.judge} and {one.against} share no item that both judged"
        return
    better = sum(item.outcome == "right" for item in one.parted)
    yield (
        f"{one.judge} and {one.against} part on {len(one.parted)} of {one.num_items} items: only {one.judge} is right "
        f"on {better}, only {one.against} on {len(one.parted) - better}"
        + (f"; all in {JUDGE_RESULTS}, the first ones:" if one.parted else "")
    )
    for item in one.parted[:SHOWN_APART]:
        right = one.judge if item.outcome == "right" else one.against
        question = " ".join(item.question.split())
        cut = question if len(question) <= MAX_CHARS else f"{question[: MAX_CHARS - 2]}.."
        yield f"  {item.item_id}: {right} is right; {cut}"


def costs(tokens_by_k: Mapping[int, float]) -> str:
    return ", ".join(f"{tokens:.0f} at k={k}" for k, tokens in tokens_by_k.items())


def causes(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{count} {cause}' for cause, count in sorted(counts.items()))})" if counts else ""
