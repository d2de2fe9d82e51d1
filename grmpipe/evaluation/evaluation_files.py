"""The output of task=evaluate: a table, evaluation.json, judged.jsonl, a plot. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.box import MINIMAL
from rich.console import Console
from rich.table import Table

from grmpipe.config.judge import Scale
from grmpipe.evaluation.against_labels import JudgedItem, JudgeEvaluation, SubsetResult, outcome_of
from grmpipe.observe.plain_json import plain
from grmpipe.types import Failed

NO_PICTURE = "no plot: matplotlib isn't installed; type: pip install matplotlib"


def write_files(run_dir: Path, judged: Sequence[JudgedItem], result: JudgeEvaluation, scale: Scale) -> bool:
    """Write the files. Returns whether there is a plot."""
    (run_dir / "evaluation.json").write_text(json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n", "utf-8")
    lines = (json.dumps(plain(line_of(one, scale)), ensure_ascii=False) + "\n" for one in judged)
    (run_dir / "judged.jsonl").write_text("".join(lines), "utf-8")
    return draw(result, run_dir / "accuracy.png")


def line_of(one: JudgedItem, scale: Scale) -> dict[str, object]:
    scores = one.verdict_scores(scale)
    return {
        "item_id": one.item.item_id,
        "subset": one.item.subset,
        "outcome": outcome_of(one.item, scores),
        "scores": scores,
        "failed": {i: r.verdict.cause for i, r in enumerate(one.reports) if isinstance(r.verdict, Failed)},
        "judgements": [
            {"siblings": judgement.siblings, "scores": judgement.scores, "text": judgement.completion.text}
            for judgement in one.judgements
        ],
        "failures": [{"cause": failure.cause, "detail": failure.detail} for failure in one.failures],
    }


# -- the table -----------------------------------------------------------------------------------------------------


def show(result: JudgeEvaluation, max_subsets: int, *, is_drawn: bool) -> None:
    """Print the results. max_subsets: subsets sampled for each smaller k. is_drawn: whether there is a plot."""
    console = Console()
    console.print(table_of(result))
    if result.overall.with_meta_rm:
        console.print(meta_rm_table_of(result))
    for line in notes_on(result, max_subsets):
        console.print(line, highlight=False, markup=False)
    if result.overall.by_k and not is_drawn:
        console.print(NO_PICTURE, highlight=False)


def table_of(result: JudgeEvaluation) -> Table:
    heads = ("items", "judged", "+-", *(f"k={k}" for k in result.overall.by_k), "tied", "failed")
    return by_subset(result, "right, in percent of all items: failed and tied ones count as wrong", heads, cells_of)


def meta_rm_table_of(result: JudgeEvaluation) -> Table:
    """The table with the meta-RM, separate because both together don't fit 80 columns."""
    heads = ("items", *(f"meta_rm@{k}" for k in result.overall.with_meta_rm))
    return by_subset(result, "the same, by the better half of each vote", heads, meta_rm_cells_of)


def by_subset(
    result: JudgeEvaluation, title: str, heads: Sequence[str], cells: Callable[[SubsetResult], Iterator[str]]
) -> Table:
    table = Table(title=title, box=MINIMAL, padding=0)
    table.add_column("subset", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    rows = [*result.subsets.items(), ("overall", result.overall)]
    for place, (name, subset) in enumerate(rows, start=1):
        table.add_row(name, *cells(subset), end_section=place == len(rows) - 1)
    return table


def cells_of(subset: SubsetResult) -> Iterator[str]:
    yield str(subset.judged.num_items)
    shares = [subset.judged.accuracy, subset.judged.error, *(one.accuracy for one in subset.by_k.values())]
    yield from map(percent, (*shares, subset.judged.tied_share, subset.judged.failed_share))


def meta_rm_cells_of(subset: SubsetResult) -> Iterator[str]:
    yield str(subset.judged.num_items)
    yield from (percent(one.accuracy) for one in subset.with_meta_rm.values())


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def notes_on(result: JudgeEvaluation, max_subsets: int) -> Iterator[str]:
    """Notes on what the table leaves out, one per line."""
    yield "judged: by the judge's own verdicts, +- its standard error; a single response must get its label"
    num_failed = sum(result.failed_judgements.values())
    if result.num_judgements:
        yield f"judgements: {result.num_judgements} asked, {num_failed} failed{causes(result.failed_judgements)}"
    if result.failed_items:
        yield f"items without a verdict{causes(result.failed_items)}; they count as wrong"
    if result.tokens_by_k:
        costs = ", ".join(f"{tokens:.0f} at k={k}" for k, tokens in result.tokens_by_k.items())
        yield f"tokens sampled per item: {costs}"
        yield f"smaller k: subsets of the same judgements, all or {max_subsets} drawn, with a new vote"
    if result.score_error is not None:
        yield f"scored responses: the score differs from the label by {result.score_error:.2f} on average"
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


def causes(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{count} {cause}' for cause, count in sorted(counts.items()))})" if counts else ""


# -- the plot ------------------------------------------------------------------------------------------------------


def draw(result: JudgeEvaluation, path: Path) -> bool:
    """Plot accuracy over k, overall and by subset. False if there is nothing to plot, or no matplotlib."""
    if not result.overall.by_k:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, subset in result.subsets.items():
        axes.plot(list(subset.by_k), [one.accuracy for one in subset.by_k.values()], alpha=0.5, lw=1, label=name)
    for label, by_k, style in (
        ("overall", result.overall.by_k, "o-"), ("overall, with meta-RM", result.overall.with_meta_rm, "s--")
    ):  # fmt: skip
        if by_k:
            values, errors = [one.accuracy for one in by_k.values()], [one.error for one in by_k.values()]
            axes.errorbar(list(by_k), values, yerr=errors, fmt=style, color="black", capsize=3, label=label)
    axes.set(xscale="log", xlabel="judgements per vote (k)", ylabel="accuracy", title="The judge against labels")
    axes.set_xticks(list(result.overall.by_k), [str(k) for k in result.overall.by_k], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
