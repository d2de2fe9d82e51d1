"""A judge against labelled work: outcomes, accuracy by subset and by k, with 95 % intervals. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from grmpipe.config.judge import Scale
from grmpipe.data.prompts import identify_prompt
from grmpipe.evaluation.intervals import Estimate, estimate_stratified
from grmpipe.evaluation.leaderboards import Leaderboard, find_leaderboard
from grmpipe.evaluation.revote import Counting, all_drawn, best_by_meta_rm, draw_subsets, make_ballots, scores_of_draw
from grmpipe.judge.kinds.labels import round_score
from grmpipe.judge.monitor.position_bias import PositionBias, correlation_within
from grmpipe.judge.votes import Vote, Weights, mean
from grmpipe.models.seeds import derive_seed
from grmpipe.types import (
    Failed,
    FailedJudgement,
    Judgement,
    JudgeReport,
    Labelled,
    Metrics,
    Prompt,
    RankedResponses,
    ScoredResponse,
    Verdict,
)

T = TypeVar("T")
Outcome = Literal["right", "wrong", "tied", "failed"]
Scores = Mapping[int, float]  # sibling -> score; without siblings that have none


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedItem:
    """A labelled item and the reports on its responses, in their order.

    num_asked:    judgements requested for each of its questions.
    meta_weights: the meta-RM's, one per judgement; empty if it failed, None without a meta-RM.
    """

    item: Labelled
    reports: tuple[JudgeReport, ...]
    num_asked: int
    meta_rm_weights: tuple[float, ...] | None = None

    @property
    def judgements(self) -> tuple[Judgement, ...]:
        return tuple(judgement for report in self.reports for judgement in report.judgements)

    def verdict_scores(self, scale: Scale) -> dict[int, float]:
        """The verdicts, as scores on a scale."""
        return {
            sibling: scale.to_score(report.verdict.outcome)
            for sibling, report in enumerate(self.reports)
            if isinstance(report.verdict, Verdict)
        }

    @property
    def outage(self) -> Failed | None:
        """The first verdict that is missing because the judge's service failed: such an item measures nothing."""
        failed = (report.verdict for report in self.reports if isinstance(report.verdict, Failed))
        return next((verdict for verdict in failed if verdict.is_outage), None)

    @property
    def judges(self) -> tuple[str, ...]:
        """The judges that were asked about all of its responses, where there are several."""
        first, *others = self.reports
        return tuple(name for name in first.by_judge if all(name in report.by_judge for report in others))

    def by(self, judge: str) -> JudgedItem:
        """The item as one of several judges has judged it."""
        reports = tuple(report.by_judge[judge] for report in self.reports)
        return JudgedItem(item=self.item, reports=reports, num_asked=self.num_asked)


def count_tokens(report: JudgeReport) -> int:
    """Tokens sampled for a report, including failed judgements."""
    completions = [one.completion for one in answers_in(report)]
    completions += [report.principles] if report.principles is not None else []
    return sum(completion.num_tokens for completion in completions)


def count_prompt_tokens(reports: Sequence[JudgeReport]) -> int | None:
    """Tokens of the prompts behind judgements, including failed ones. None if a model returns no token ids."""
    lengths = [len(one.prompt_ids) for report in reports for one in answers_in(report)]
    return None if 0 in lengths else sum(lengths)


def answers_in(report: JudgeReport) -> list[Judgement | FailedJudgement]:
    return [*report.judgements, *(failure for failure in report.failures if isinstance(failure, FailedJudgement))]


def decide_outcome(item: Labelled, scores: Scores) -> Outcome:
    """The outcome of an item. Ranked: whether all responses of the highest grade are strictly above all others (a tie
    is wrong, and counted separately); where all grades are equal, whether the scores are. Scored: whether the score is
    the label, both rounded.

    An item has failed if one of its responses has no score: it is never right.
    """
    if isinstance(item, ScoredResponse):
        return (
            "failed" if 0 not in scores else "right" if round_score(scores[0]) == round_score(item.score) else "wrong"
        )
    if any(sibling not in scores for sibling in range(len(item.responses))):
        return "failed"
    highest = max(item.grades)
    best = [scores[sibling] for sibling, grade in enumerate(item.grades) if grade == highest]
    others = [scores[sibling] for sibling, grade in enumerate(item.grades) if grade < highest]
    if not others:
        return "right" if min(best) == max(best) else "wrong"
    return "right" if min(best) > max(others) else "tied" if min(best) == max(others) else "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOutcomes:
    """The outcomes of an item; several are samples of it, whose mean counts. asked: its prompt, which items share."""

    asked: Hashable
    outcomes: Sequence[Outcome]

    def share(self, outcome: Outcome) -> float:
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


def by_prompt(items: Sequence[ItemOutcomes], outcome: Outcome) -> dict[Hashable, list[float]]:
    shares: dict[Hashable, list[float]] = {}
    for item in items:
        shares.setdefault(item.asked, []).append(item.share(outcome))
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount:
    """How smaller votes are taken from the large one. most: subsets of an item per k; above it subsets are sampled.
    weigh: (prompt) -> the weights of its criteria, for a judge by rubrics.
    """

    ks: tuple[int, ...]
    vote: Vote
    most: int
    seed: int
    pairwise: bool = False
    weigh: Callable[[Prompt], Weights] | None = None


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
    num_prompt_tokens: summed over judgements, without shared principles; None for a model that returns no token ids.
    """

    overall: SubsetResult  # the leaderboard's mean over sections, if all of its subsets are here, else that over items
    mean_over: str  # what `overall` is the mean of, in words
    over_items: SubsetResult
    sections: Mapping[str, SubsetResult]  # a leaderboard's; empty without one
    subsets: Mapping[str, SubsetResult]
    tokens_by_k: Mapping[int, float]  # sampled
    prompt_tokens_by_k: Mapping[int, float]
    failed_judgements: Mapping[str, int]  # by cause
    failed_items: Mapping[str, int]  # by the cause of the first response without a verdict
    lost_items: Mapping[str, int]  # by the cause of the first outage
    num_judgements: int
    num_tokens: int  # sampled
    num_prompt_tokens: int | None
    bias: Metrics  # order_flips_share, noise_flips_share, first_place_share, score_length_correlation, ...
    score_error: float | None  # mean distance from the label, over scored responses
    asked_verdicts: int = 0
    asked_verdicts_read: int = 0
    by_judge: Mapping[str, JudgeEvaluation] = field(default_factory=dict)  # empty with a single judge


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
    by_subset: dict[str, list[JudgedItem]] = {}
    for one in judged:
        by_subset.setdefault(one.item.subset or "all", []).append(one)
    failures = [failure for report in reports for failure in report.failures]
    num_counted, num_tokens = sum(len(report.judgements) for report in reports), sum(map(count_tokens, reports))
    num_prompt_tokens = count_prompt_tokens(reports)
    num_asked = max((one.num_asked for one in judged), default=1)
    ks = recount.ks if num_counted else ()
    over_items = compute_result([(1.0, judged)], scale, recount)
    board, missing = find_leaderboard(by_subset)
    sections = split_sections(board, by_subset) if board is not None and not missing else {}
    whole = [(share, items) for strata in sections.values() for share, items in strata]
    return JudgeEvaluation(
        overall=compute_result(whole, scale, recount) if whole else over_items,
        mean_over=words_of_mean(board, missing),
        over_items=over_items,
        sections={name: compute_result(strata, scale, recount) for name, strata in sections.items()},
        subsets={name: compute_result([(1.0, own)], scale, recount) for name, own in sorted(by_subset.items())},
        tokens_by_k={k: num_tokens / num_items * k / num_asked for k in ks},
        prompt_tokens_by_k={
            k: num_prompt_tokens / num_items * k / num_asked for k in ks if num_prompt_tokens is not None
        },
        failed_judgements=Counter(failure.cause for failure in failures),
        failed_items=Counter(failure.cause for one in judged if (failure := first_failure(one)) is not None),
        lost_items=outages,
        num_judgements=num_counted + len(failures),
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        bias=measure_bias(judged, scale),
        score_error=score_error(judged, scale),
        asked_verdicts=sum(one.completion.asked is not None for report in reports for one in answers_in(report)),
        asked_verdicts_read=sum(one.completion.asked is not None for report in reports for one in report.judgements),
    )


def split_sections(
    board: Leaderboard, by_subset: Mapping[str, Sequence[JudgedItem]]
) -> dict[str, list[tuple[float, Sequence[JudgedItem]]]]:
    """Section -> its subsets, each with its share of the section."""
    return {
        section: [(weight / math.fsum(weights.values()), by_subset[subset]) for subset, weight in weights.items()]
        for section, weights in board.sections.items()
    }


def words_of_mean(board: Leaderboard | None, missing: Collection[str]) -> str:
    if board is None:
        return "items"
    if missing:
        return f"items, not {board.name}'s sections: {', '.join(sorted(missing))} missing"
    return f"{board.name}'s sections {', '.join(board.sections)}" + (f"; {board.apart}" if board.apart else "")


def compute_result(strata: Strata[JudgedItem], scale: Scale, recount: Recount) -> SubsetResult:
    counted = [one for _, judged in strata for one in judged if one.judgements]
    ks = recount.ks if counted else ()
    meta_rm_ks = ks if all(one.meta_rm_weights is not None for one in counted) else ()

    def accuracy(outcomes: Callable[[JudgedItem], Sequence[Outcome]]) -> Accuracy:
        return Accuracy.over(
            [
                (
                    weight,
                    [ItemOutcomes(asked=identify_prompt(one.item.prompt), outcomes=outcomes(one)) for one in judged],
                )
                for weight, judged in strata
            ]
        )

    def recount_at(k: int, meta_rm: bool) -> Accuracy:
        return accuracy(lambda one: recount_outcomes(one, k, recount, scale, meta_rm))

    return SubsetResult(
        judged=accuracy(lambda one: [decide_outcome(one.item, one.verdict_scores(scale))]),
        by_k={k: recount_at(k, meta_rm=False) for k in ks},
        with_meta_rm={k: recount_at(k, meta_rm=True) for k in meta_rm_ks},
    )


def recount_outcomes(one: JudgedItem, k: int, recount: Recount, scale: Scale, meta_rm: bool = False) -> list[Outcome]:
    """The outcomes of subsets of k judgements; with a meta-RM, of the better half of each subset."""
    if meta_rm and not one.meta_rm_weights:
        return ["failed"]
    ballots = make_ballots(one.judgements, one.num_asked, one.meta_rm_weights if meta_rm else None)
    counting = Counting(vote=mean if meta_rm else recount.vote, pairwise=recount.pairwise)
    if recount.weigh is not None:
        weights = recount.weigh(one.item.prompt)
        counting = replace(counting, to_score=lambda scores: weights.to_score(scores, scale))
    rng = random.Random(derive_seed(recount.seed, f"recount {one.item.item_id} {k}"))
    return [
        decide_outcome(one.item, scores_of_draw(ballots, draw, counting, best_by_meta_rm if meta_rm else all_drawn))
        for draw in draw_subsets(one.num_asked, k, recount.most, rng)
    ]


def first_failure(one: JudgedItem) -> Failed | None:
    return next((report.verdict for report in one.reports if isinstance(report.verdict, Failed)), None)


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


def score_error(judged: Sequence[JudgedItem], scale: Scale) -> float | None:
    distances = [
        abs(scores[0] - one.item.score)
        for one in judged
        if isinstance(one.item, ScoredResponse) and (scores := one.verdict_scores(scale))
    ]
    return statistics.fmean(distances) if distances else None
