"""A judge against labelled work: accuracy by subset, part and k, and what else the labels tell, with 95 % intervals.
Pure.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from grmpipe.config.judge import LabelConfig, Scale
from grmpipe.data.prompts import identify_prompt
from grmpipe.evaluation.intervals import Estimate, Z, estimate_correlation, estimate_stratified
from grmpipe.evaluation.judge_comparison import JudgeComparison
from grmpipe.evaluation.judged_items import (
    JudgedItem,
    Outcome,
    Scores,
    answers_in,
    count_prompt_tokens,
    count_tokens,
    decide_outcome,
    first_failure,
    is_tie,
)
from grmpipe.evaluation.label_figures import (
    gather_places,
    measure_figures,
    measure_orders,
    measure_people,
    measure_rated,
    split_by_trait,
)
from grmpipe.evaluation.leaderboards import (
    TIES,
    Credit,
    Leaderboard,
    find_leaderboard,
    find_ties,
    find_ties_prompt,
    score_ties,
)
from grmpipe.evaluation.revote import Counting, all_drawn, best_by_meta_rm, draw_subsets, make_ballots, scores_of_draw
from grmpipe.judge.monitor.position_bias import PositionBias, correlation_within
from grmpipe.judge.votes import Vote, Weights, mean
from grmpipe.models.seeds import derive_seed
from grmpipe.types import Judgement, JudgeReport, Metrics, Prompt, RankedResponses

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOutcomes:
    """The outcomes of an item; several are samples of it, whose mean counts.

    asked:   its prompt, which items share.
    credits: what each outcome is worth by a benchmark; None: 1 if it is right.
    """

    asked: Hashable
    outcomes: Sequence[Outcome]
    credits: Sequence[float] | None = None

    def share(self, outcome: Outcome) -> float:
        if outcome == "right" and self.credits is not None:
            return math.fsum(self.credits) / len(self.credits)
        return sum(one == outcome for one in self.outcomes) / len(self.outcomes)


Strata = Sequence[tuple[float, Sequence[T]]]  # (weight, members), none of them empty: a mean of means


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A share of all items, including failed and tied ones. Over several strata: the weighted mean of their shares.

    error, low, high: its standard error and 95 % interval over prompts: items with the same prompt aren't independent.
    """

    accuracy: float
    error: float
    low: float
    high: float
    num_items: int
    num_prompts: int
    tied_share: float
    failed_share: float

    @staticmethod
    def over(strata: Strata[ItemOutcomes]) -> Accuracy:
        """The accuracy over items; NaN over none."""

        def share(outcome: Outcome) -> Estimate:
            return estimate_stratified([(weight, by_prompt(items, outcome)) for weight, items in strata])

        right = share("right")
        return Accuracy(
            accuracy=right.mean,
            error=right.error,
            low=right.low,
            high=right.high,
            num_items=sum(len(items) for _, items in strata),
            num_prompts=right.num_clusters,
            tied_share=share("tied").mean,
            failed_share=share("failed").mean,
        )

    def with_figure(self, figure: Estimate) -> Accuracy:
        """The same items, measured by another figure than their mean."""
        low, high = max(0.0, figure.low), min(1.0, figure.high)
        return replace(self, accuracy=figure.mean, error=figure.error, low=low, high=high)


def by_prompt(items: Sequence[ItemOutcomes], outcome: Outcome) -> dict[Hashable, list[float]]:
    shares: dict[Hashable, list[float]] = {}
    for item in items:
        shares.setdefault(item.asked, []).append(item.share(outcome))
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount:
    """How verdicts are measured, and smaller votes taken from the large one.

    pass_score: the lowest score that passes a response, for labels of yes or no.
    most:       subsets of an item per k; above it subsets are sampled.
    margins:    see Counting.
    weigh:      (prompt) -> the weights of its criteria, for a judge by rubrics.
    """

    ks: tuple[int, ...]
    vote: Vote
    most: int
    seed: int
    pairwise: bool = False
    margins: Scale | None = None
    weigh: Callable[[Prompt], Weights] | None = None
    pass_score: float = LabelConfig.pass_score


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetResult:
    """The results of a subset. `judged`: by the judge's verdicts. `by_k`, `with_meta_rm`: recounted; empty without
    judgements.
    """

    judged: Accuracy
    by_k: Mapping[int, Accuracy] = field(default_factory=dict)
    with_meta_rm: Mapping[int, Accuracy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEvaluation:
    """The result of evaluating a judge. Costs are means over items; tokens of smaller votes are proportional shares.
    Items that the judge's service failed are in `lost_items` and in the costs only.

    num_judgements, num_tokens, num_prompt_tokens, failed_judgements: where there are several judges, one's counts also
    cover items about which it was asked in part, which are in none of its accuracies.
    asked_verdicts: judgements without a verdict that were asked for it; asked_verdicts_read: those that then had one.
    tool_calls: of judges with tools; called_tools: judgements with calls.
    num_prompt_tokens: summed over judgements, without shared principles; None for a model that returns no token ids.
    seconds:  that judging all items took; None: not measured of this judge alone.
    cost_usd: of all its requests; None: no price is known.
    """

    overall: SubsetResult  # a benchmark's own figure, if all of its subsets are here, else the mean over items
    mean_over: str  # what `overall` is the mean of, in words
    over_items: SubsetResult
    sections: Mapping[str, SubsetResult]  # a benchmark's; empty without one
    subsets: Mapping[str, SubsetResult]
    parts: Mapping[str, Mapping[str, Accuracy]]  # trait of items (source, length, script) -> value -> those with it
    figures: Mapping[str, Estimate]  # what else the labels tell, by name
    people: Mapping[str, Estimate]  # the same of each rater against the others; empty with single raters
    tokens_by_k: Mapping[int, float]  # sampled
    prompt_tokens_by_k: Mapping[int, float]
    failed_judgements: Mapping[str, int]  # by cause
    failed_items: Mapping[str, int]  # by the cause of the first response without a verdict
    lost_items: Mapping[str, int]  # by the cause of the first outage
    num_ties: int  # items whose labels are all equal, which are in no accuracy
    num_judgements: int
    num_tokens: int  # sampled
    num_prompt_tokens: int | None
    bias: Metrics  # order_flips_share, noise_flips_share, first_place_share, score_length_correlation, ...
    seconds: float | None = None
    cost_usd: float | None = None
    asked_verdicts: int = 0
    asked_verdicts_read: int = 0
    tool_calls: int = 0
    called_tools: int = 0
    by_judge: Mapping[str, JudgeEvaluation] = field(default_factory=dict)  # empty with a single judge
    comparisons: tuple[JudgeComparison, ...] = ()  # of each further judge with the first one, of that with an earlier

    @property
    def num_items(self) -> int:
        """The items that were judged, those that the judge's service failed among them."""
        return self.over_items.judged.num_items + self.num_ties + sum(self.lost_items.values())


def evaluate(judged: Sequence[JudgedItem], scale: Scale, recount: Recount) -> JudgeEvaluation:
    """Evaluate at least one item; where there are several judges, also each on the items about which it was asked.

    scale: the labels'; verdicts on another one are compared on this.
    """
    whole = evaluate_judgements(judged, [report for one in judged for report in one.reports], scale, recount)
    by_judge = {
        name: evaluate_judgements(
            [one.by(name) for one in judged if name in one.judges], reports, scale, replace(recount, ks=())
        )
        for name, reports in reports_by_judge(judged).items()
    }
    return replace(whole, by_judge=by_judge)


def reports_by_judge(judged: Sequence[JudgedItem]) -> dict[str, list[JudgeReport]]:
    """Judge -> all its reports; empty with a single judge."""
    found: dict[str, list[JudgeReport]] = {}
    for name, own in (named for one in judged for report in one.reports for named in report.by_judge.items()):
        found.setdefault(name, []).append(own)
    return found


def evaluate_judgements(
    judged: Sequence[JudgedItem], reports: Sequence[JudgeReport], scale: Scale, recount: Recount
) -> JudgeEvaluation:
    """The evaluation of one judge, or of all together. reports: all that it gave, which are its costs."""
    outages = Counter[str](one.outage.cause for one in judged if one.outage is not None)
    num_items, judged = len(judged), [one for one in judged if one.outage is None]
    figures = measure_all(judged, scale, recount.pass_score)
    num_ties, judged = sum(is_tie(one.item) for one in judged), [one for one in judged if not is_tie(one.item)]
    by_subset: dict[str, list[JudgedItem]] = {}
    for one in judged:
        by_subset.setdefault(one.item.subset or "all", []).append(one)
    failures = [failure for report in reports for failure in report.failures]
    num_counted, num_tokens = sum(len(report.judgements) for report in reports), sum(map(count_tokens, reports))
    num_prompt_tokens = count_prompt_tokens(reports)
    num_asked = max((one.num_asked for one in judged), default=1)
    ks = recount.ks if num_counted else ()
    over_items = compute_result([(1.0, judged)], scale, recount)
    overall, sections, mean_over = over_items, dict[str, SubsetResult](), "items"
    board, missing = find_leaderboard(judged)
    if board is not None and missing:
        mean_over = f"items, not {board.name}'s sections: {', '.join(sorted(missing))} missing"
    elif board is not None:
        overall, sections = compute_leaderboard(board, judged, scale, recount, figures.get("ties"))
        mean_over = f"{board.name}'s {'items' if board.by_items else 'sections'} {', '.join(board.sections)}"
    return JudgeEvaluation(
        overall=overall,
        mean_over=mean_over,
        over_items=over_items,
        sections=sections,
        subsets={name: compute_result([(1.0, own)], scale, recount) for name, own in sorted(by_subset.items())},
        parts={
            trait: {
                name: compute_result([(1.0, [judged[at] for at in places])], scale, replace(recount, ks=())).judged
                for name, places in parts.items()
            }
            for trait, parts in split_by_trait([one.item for one in judged]).items()
        },
        figures=figures,
        people=measure_people([one.item for one in judged], recount.pass_score),
        tokens_by_k={k: num_tokens / num_items * k / num_asked for k in ks},
        prompt_tokens_by_k={
            k: num_prompt_tokens / num_items * k / num_asked for k in ks if num_prompt_tokens is not None
        },
        failed_judgements=Counter(failure.cause for failure in failures),
        failed_items=Counter(failure.cause for one in judged if (failure := first_failure(one)) is not None),
        lost_items=outages,
        num_ties=num_ties,
        num_judgements=num_counted + len(failures),
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        bias=measure_bias(judged, scale),
        asked_verdicts=sum(one.completion.has_asked_verdict for report in reports for one in answers_in(report)),
        asked_verdicts_read=sum(one.completion.has_asked_verdict for report in reports for one in report.judgements),
        tool_calls=sum(one.completion.num_calls for report in reports for one in answers_in(report)),
        called_tools=sum(bool(one.completion.tool_results) for report in reports for one in answers_in(report)),
    )


def measure_all(judged: Sequence[JudgedItem], scale: Scale, pass_score: float) -> dict[str, Estimate]:
    """The figures beside the accuracy. Those of orders are of a single judge: others see other orders."""
    rows = [(one, one.verdict_scores(scale)) for one in judged]
    given = [(one.item, scores) for one, scores in rows]
    figures = {**measure_rated(given, pass_score), **measure_figures(given, pass_score)}
    if len({name for one in judged for report in one.reports for name in report.own_reports}) == 1:
        figures |= measure_orders(judged)
    ties = [(one, one.verdict_scores(scale)) for one in find_ties(judged)]
    if not ties or math.isnan(score_ties(ties)):
        return figures
    pairs = gather_places([find_ties_prompt(one) for one, _ in ties])  # of one right answer, and of several
    return figures | {"ties": estimate_correlation(lambda at: score_ties([ties[i] for i in at]), list(pairs.values()))}


def compute_leaderboard(
    board: Leaderboard, judged: Sequence[JudgedItem], scale: Scale, recount: Recount, ties: Estimate | None
) -> tuple[SubsetResult, dict[str, SubsetResult]]:
    """The whole of a benchmark, and its sections. ties: the figure of RewardBench 2's Ties, which is no mean over
    items; the votes of fewer judgements have the share of accurate ones in its place.
    """
    by_subset: dict[str, list[JudgedItem]] = {}
    for one in judged:
        by_subset.setdefault(board.find_subset(one.item.subset) or "", []).append(one)
    strata = {
        section: [(weight / math.fsum(weights.values()), by_subset[subset]) for subset, weight in weights.items()]
        for section, weights in board.sections.items()
    }
    sections = {name: compute_result(own, scale, recount, board.credit) for name, own in strata.items()}
    everything = [(1.0, judged)] if board.by_items else [stratum for own in strata.values() for stratum in own]
    whole = compute_result(everything, scale, recount, board.credit)
    if ties is None or TIES not in sections:
        return whole, sections
    sections[TIES] = replace(sections[TIES], judged=sections[TIES].judged.with_figure(ties))
    accuracies = [section.judged.accuracy for section in sections.values()]
    errors = [section.judged.error**2 for section in sections.values()]
    mean, half = math.fsum(accuracies) / len(accuracies), Z * math.sqrt(math.fsum(errors)) / len(errors)
    of_all = Estimate(mean=mean, low=mean - half, high=mean + half, num_clusters=whole.judged.num_prompts)
    return replace(whole, judged=whole.judged.with_figure(of_all)), sections


def compute_result(
    strata: Strata[JudgedItem], scale: Scale, recount: Recount, credit: Credit | None = None
) -> SubsetResult:
    """credit: what an item is worth by a benchmark; None: 1 if it is right."""
    counted = [one for _, judged in strata for one in judged if one.judgements]
    ks = recount.ks if counted else ()
    meta_rm_ks = ks if all(one.meta_rm_weights is not None for one in counted) else ()

    def accuracy(list_scores: Callable[[JudgedItem], Sequence[Scores]]) -> Accuracy:
        def decide(one: JudgedItem) -> ItemOutcomes:
            sampled = list_scores(one)
            return ItemOutcomes(
                asked=identify_prompt(one.item.prompt),
                outcomes=[decide_outcome(one.item, scores, recount.pass_score) for scores in sampled],
                credits=None if credit is None else [credit(one, scores) for scores in sampled],
            )

        return Accuracy.over([(weight, list(map(decide, judged))) for weight, judged in strata])

    def recount_at(k: int, meta_rm: bool) -> Accuracy:
        return accuracy(lambda one: recount_scores(one, k, recount, scale, meta_rm))

    return SubsetResult(
        judged=accuracy(lambda one: [one.verdict_scores(scale)]),
        by_k={k: recount_at(k, meta_rm=False) for k in ks},
        with_meta_rm={k: recount_at(k, meta_rm=True) for k in meta_rm_ks},
    )


def recount_scores(one: JudgedItem, k: int, recount: Recount, scale: Scale, meta_rm: bool = False) -> list[Scores]:
    """The scores by subsets of k judgements; with a meta-RM, by the better half of each subset."""
    if meta_rm and not one.meta_rm_weights:
        return [{}]
    ballots = make_ballots(one.judgements, one.num_asked, one.meta_rm_weights if meta_rm else None)
    vote = mean if meta_rm else recount.vote
    counting = Counting(vote=vote, pairwise=recount.pairwise, margins=recount.margins)
    if recount.weigh is not None:
        weights = recount.weigh(one.item.prompt)
        counting = replace(counting, to_score=lambda scores: weights.to_score(scores, scale))
    rng = random.Random(derive_seed(recount.seed, f"recount {one.item.item_id} {k}"))
    return [
        scores_of_draw(ballots, draw, counting, best_by_meta_rm if meta_rm else all_drawn)
        for draw in draw_subsets(one.num_asked, k, recount.most, rng)
    ]


def measure_bias(judged: Sequence[JudgedItem], scale: Scale) -> Metrics:
    """Biases of the judge, or of several: judgements of different judges aren't compared with each other. For length:
    within the responses to one prompt, next to the same bias of the labels.
    """
    ranked = [(one, one.item) for one in judged if isinstance(one.item, RankedResponses)]

    def correlated(value: Callable[[JudgedItem, RankedResponses, int], float | None]) -> float | None:
        return correlation_within(
            [
                (float(len(text)), number)
                for sibling, text in enumerate(item.responses)
                if (number := value(one, item, sibling)) is not None
            ]
            for one, item in ranked
        )

    values = {
        "score_length_correlation": correlated(lambda one, _, sibling: one.verdict_scores(scale).get(sibling)),
        "label_length_correlation": correlated(lambda _, item, sibling: item.grades[sibling]),
    }
    judgements: defaultdict[str, list[Judgement]] = defaultdict(list)
    for name, own in (item for one in judged for report in one.reports for item in report.own_reports.items()):
        judgements[name] += own.judgements
    habits = sum((PositionBias().with_judgements(own) for own in judgements.values()), PositionBias())
    return habits.metrics() | {name: value for name, value in values.items() if value is not None}
