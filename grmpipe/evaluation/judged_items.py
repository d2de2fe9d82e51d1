"""Labelled items that were judged: verdicts, tokens, and whether a verdict is right. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grmpipe.config.judge import Scale
from grmpipe.judge.kinds.label_format import round_score
from grmpipe.types import Failed, FailedJudgement, Judgement, JudgeReport, Labelled, ScoredResponse, Verdict

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
        """Those that vote by themselves: without those that have only some criteria of a rubric."""
        return tuple(one for report in self.reports for one in report.judgements if not one.criteria)

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

    def beside(self, own_name: str, name: str, other: JudgedItem) -> JudgedItem:
        """The item with the reports of a further judge, which the verdicts don't use."""
        pairs = zip(self.reports, other.reports, strict=True)
        reports = [replace(a, by_judge={**(a.by_judge or {own_name: a}), name: b}) for a, b in pairs]
        return replace(self, reports=tuple(reports))


def count_tokens(report: JudgeReport) -> int:
    """Tokens sampled for a report, including failed judgements."""
    completions = [one.completion for one in answers_in(report)]
    completions += [report.principles] if report.principles is not None else []
    return sum(completion.num_generated for completion in completions)


def count_prompt_tokens(reports: Sequence[JudgeReport]) -> int | None:
    """Tokens of the prompts behind judgements, including failed ones. None if a model returns no token ids."""
    lengths = [len(one.prompt_ids) for report in reports for one in answers_in(report)]
    return None if 0 in lengths else sum(lengths)


def answers_in(report: JudgeReport) -> list[Judgement | FailedJudgement]:
    return [*report.judgements, *(failure for failure in report.failures if isinstance(failure, FailedJudgement))]


def decide_outcome(item: Labelled, scores: Scores, pass_score: float) -> Outcome:
    """The outcome of an item. Ranked: whether all responses of the highest grade are strictly above all others (a tie
    is wrong, and counted separately); where all grades are equal, whether the scores are. Scored: whether the score is
    the label, both rounded; of a yes or no, whether both are at least `pass_score`, or both below.

    An item has failed if one of its responses has no score: it is never right.
    """
    if isinstance(item, ScoredResponse):
        if 0 not in scores:
            return "failed"
        if item.is_yes_no:
            return "right" if (scores[0] >= pass_score) == (item.score >= pass_score) else "wrong"
        return "right" if round_score(scores[0]) == round_score(item.score) else "wrong"
    if any(sibling not in scores for sibling in range(len(item.responses))):
        return "failed"
    highest = max(item.grades)
    best = [scores[sibling] for sibling, grade in enumerate(item.grades) if grade == highest]
    others = [scores[sibling] for sibling, grade in enumerate(item.grades) if grade < highest]
    if not others:
        return "right" if min(best) == max(best) else "wrong"
    return "right" if min(best) > max(others) else "tied" if min(best) == max(others) else "wrong"


def is_tie(item: Labelled) -> bool:
    """Whether its labels say that no response is better: such an item is in no accuracy."""
    return not isinstance(item, ScoredResponse) and len(set(item.grades)) == 1


def compare_orders(judgements: Sequence[Judgement], first: int, second: int) -> tuple[float | None, float | None]:
    """By how much more judgements preferred one response to another, from -1 to 1: those that showed it first, and
    those that showed it last. None: no judgement did.
    """
    found: tuple[list[int], list[int]] = ([], [])
    for judgement in judgements:
        places = {sibling: place for place, sibling in enumerate(judgement.siblings)}
        if first in places and second in places:
            gap = judgement.scores[places[first]] - judgement.scores[places[second]]
            found[places[first] > places[second]].append((gap > 0) - (gap < 0))
    first_shown, last_shown = (statistics.fmean(signs) if signs else None for signs in found)
    return first_shown, last_shown


def first_failure(one: JudgedItem) -> Failed | None:
    return next((report.verdict for report in one.reports if isinstance(report.verdict, Failed)), None)
