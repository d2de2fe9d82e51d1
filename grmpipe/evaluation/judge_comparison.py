"""Two judges on the same labelled items: the paired differences, what each costs, and the items where they part."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from grmpipe.config.judge import Scale
from grmpipe.data.prompts import identify_prompt
from grmpipe.evaluation.intervals import Difference, estimate_difference
from grmpipe.evaluation.judged_items import JudgedItem, Outcome, decide_outcome, is_tie
from grmpipe.observe.run_files import JUDGED
from grmpipe.types import INFRA_CAUSES, Labelled, ScoredResponse

QUESTION_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemVerdict:
    """What one judge made of an item. error: the distance of its score from the label; None: it has no score, or the
    label is no score. is_no: whether the label is that the response is wrong, so that a wrong verdict lets it pass.
    """

    outcome: Outcome
    error: float | None = None
    is_no: bool = False


Verdicts = Mapping[str, ItemVerdict]  # by the item's id; without those that the judge's service failed


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedItem:
    """An item that only one of two judges has right. question: how the prompt's last message begins."""

    item_id: str
    question: str
    outcome: Outcome
    against_outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeComparison:
    """A judge minus another one, over the items that both judged.

    against:   the other judge's name, or the run that it was measured in.
    accuracy:  the difference of right items, which is paired: an item's difference is 1, 0 or -1.
    false_positives: that of the wrong responses that pass, over those labelled no; None without any.
    score_error: that of the distances from the label, over scored responses; None without any.
    tokens, seconds, cost_usd: sampled, taken, paid for an item, on average; None: not known.
    parted:    all items that only one of them has right, in the order of the data.
    """

    judge: str
    against: str
    num_items: int
    accuracy: Difference
    false_positives: Difference | None
    score_error: Difference | None
    tokens: float | None
    against_tokens: float | None
    seconds: float | None
    against_seconds: float | None
    cost_usd: float | None
    against_cost_usd: float | None
    parted: tuple[PartedItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJudge:
    """A judge's verdicts and, per item, its costs."""

    name: str
    verdicts: Verdicts
    tokens: float | None = None
    seconds: float | None = None
    cost_usd: float | None = None


def tabulate(judged: Sequence[JudgedItem], scale: Scale, pass_score: float) -> Verdicts:
    """The verdicts on the labels' scale."""
    counted = [one for one in judged if one.outage is None and not is_tie(one.item)]
    return {one.item.item_id: describe(one, scale, pass_score) for one in counted}


def describe(one: JudgedItem, scale: Scale, pass_score: float) -> ItemVerdict:
    scores = one.verdict_scores(scale)
    error = abs(scores[0] - one.item.labels[0]) if is_scored(one.item) and 0 in scores else None
    is_no = isinstance(one.item, ScoredResponse) and one.item.is_yes_no and one.item.score < pass_score
    return ItemVerdict(outcome=decide_outcome(one.item, scores, pass_score), error=error, is_no=is_no)


def compare_judges(judge: MeasuredJudge, against: MeasuredJudge, items: Sequence[Labelled]) -> JudgeComparison:
    shared = [item for item in items if item.item_id in judge.verdicts and item.item_id in against.verdicts]
    pairs = [(item, judge.verdicts[item.item_id], against.verdicts[item.item_id]) for item in shared]
    rights: dict[Hashable, list[float]] = {}
    passes: dict[Hashable, list[float]] = {}
    errors: dict[Hashable, list[float]] = {}
    for item, one, other in pairs:
        name = identify_prompt(item.prompt)
        rights.setdefault(name, []).append(float(one.outcome == "right") - float(other.outcome == "right"))
        if one.is_no:
            passes.setdefault(name, []).append(float(one.outcome == "wrong") - float(other.outcome == "wrong"))
        if one.error is not None and other.error is not None:
            errors.setdefault(name, []).append(one.error - other.error)
    return JudgeComparison(
        judge=judge.name,
        against=against.name,
        num_items=len(pairs),
        accuracy=estimate_difference(rights, are_shares=True),
        false_positives=estimate_difference(passes, are_shares=True) if passes else None,
        score_error=estimate_difference(errors, are_shares=False) if errors else None,
        tokens=judge.tokens,
        against_tokens=against.tokens,
        seconds=judge.seconds,
        against_seconds=against.seconds,
        cost_usd=judge.cost_usd,
        against_cost_usd=against.cost_usd,
        parted=tuple(
            PartedItem(
                item_id=item.item_id,
                question=item.prompt.messages[-1].content[:QUESTION_CHARS],
                outcome=one.outcome,
                against_outcome=other.outcome,
            )
            for item, one, other in pairs
            if (one.outcome == "right") != (other.outcome == "right")
        ),
    )


# -- an earlier evaluation ---------------------------------------------------------------------------------------------


class EarlierLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of judged.jsonl of an earlier evaluation, as far as it is compared."""

    item_id: str
    responses: list[str]
    labels: list[float]
    outcome: str
    scores: dict[str, float] = {}
    failed: dict[str, str] = {}
    judgements: list[dict[str, Any]] = []


def read_earlier(run_dir: Path, name: str, results: str, items: Sequence[Labelled]) -> MeasuredJudge:
    """The judge of an earlier evaluation of the same items. results: the file with its costs. ValueError says why it
    can't be compared.
    """
    if not (run_dir / JUDGED).exists():
        raise ValueError(f"{run_dir} has no {JUDGED}: it is no evaluation of a judge, or one that has not ended")
    lines = {line.item_id: line for line in read_lines(run_dir / JUDGED)}
    shared = [(item, lines[item.item_id]) for item in items if item.item_id in lines]
    if not shared:
        raise ValueError(
            f"{run_dir} has none of these items, which are compared by their ids; evaluate both judges on the same "
            "file (evaluate.path), with the same evaluate.num_items"
        )
    for item, line in shared:
        if tuple(line.responses) != item.responses:
            raise ValueError(
                f"{run_dir} has other responses to {item.item_id}; evaluate both on the same file (evaluate.path)"
            )
        if tuple(line.labels) != item.labels:
            raise ValueError(
                f"{run_dir} has other labels of {item.item_id}: {format_labels(line.labels)} there, "
                f"{format_labels(item.labels)} here; "
                "evaluate both judges on the same file (evaluate.path), and under the same judge.scale"
            )
    verdicts = {
        item.item_id: ItemVerdict(
            outcome=cast("Outcome", line.outcome),
            error=abs(line.scores["0"] - item.labels[0]) if is_scored(item) and "0" in line.scores else None,
        )
        for item, line in shared
        if not any(cause in INFRA_CAUSES for cause in line.failed.values())
    }
    return MeasuredJudge(name=name, verdicts=verdicts, **read_costs(run_dir / results, len(lines)))


def format_labels(labels: Sequence[float]) -> str:
    return ", ".join(f"{label:g}" for label in labels)


def is_scored(item: Labelled) -> bool:
    return isinstance(item, ScoredResponse) and not item.is_yes_no


def read_lines(path: Path) -> Iterator[EarlierLine]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            yield msgspec.json.decode(line, type=EarlierLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {number}: {error}; evaluate again") from error


def read_costs(path: Path, num_items: int) -> dict[str, float]:
    """Tokens, seconds and USD per item of an earlier evaluation, as far as it says."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
    totals = {name: found.get(f"num_{name}", found.get(name)) for name in ("tokens", "seconds", "cost_usd")}
    return {name: total / num_items for name, total in totals.items() if isinstance(total, int | float)}
