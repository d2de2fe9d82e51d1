"""Whole rollouts and judgements for a page, read from the journals at the places that the index knows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from grmpipe.judge.verdict import describe_criteria
from grmpipe.models.types import Completion
from grmpipe.observe.journal import UNREADABLE, decode_line
from grmpipe.observe.records import TEXT, THINNED, decode, decode_report, decode_rollout
from grmpipe.observe.run_files import Critique, ShownMessage, ShownTurn, get_score, show_message, show_turns
from grmpipe.types import Failed, FailedJudgement, Judgement, JudgeReport, Prompt, Rollout, Turn, Verdict
from grmpipe.viewer.index import place_of_key
from grmpipe.viewer.journal_lines import FailedLine, ItemLine
from grmpipe.viewer.queries import LABELLED, RolloutRow

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a line of rollouts.jsonl or eval_rollouts.jsonl holds for a page."""

    prompt: Prompt
    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """A rollout with what was said of it. recorded: None if its line can't be read, as `problems` says."""

    row: RolloutRow
    recorded: Recorded | None
    report: JudgeReport | None
    critiques: Sequence[Critique]
    problems: Sequence[str]

    @property
    def rollout(self) -> Rollout | None:
        return self.recorded.rollout if self.recorded is not None else None

    @property
    def verdict(self) -> Verdict | None:
        return self.report.verdict if self.report is not None and isinstance(self.report.verdict, Verdict) else None

    @property
    def breakdown(self) -> Mapping[str, float]:
        return self.verdict.breakdown if self.verdict is not None else {}

    @property
    def is_episode(self) -> bool:
        turns = self.rollout.turns if self.rollout is not None else ()
        return len(turns) > 1 or any(turn.replies or turn.tool_calls for turn in turns)

    @property
    def author(self) -> str:
        return "a labelled response" if self.row.evaluation == LABELLED else "the policy"

    @property
    def opening(self) -> list[ShownMessage]:
        return [show_message(message) for message in self.rollout.opening] if self.rollout is not None else []

    @property
    def turns(self) -> list[ShownTurn]:
        return [*show_turns(self.rollout.turns, self.verdict)] if self.rollout is not None else []

    def critiques_on(self, turn: int | None) -> list[Critique]:
        """turn: from 1; None: those on the whole rollout."""
        return [critique for critique in self.critiques if critique.turn == turn]


def read_siblings(run_dir: Path, rows: Sequence[RolloutRow]) -> list[Sibling]:
    """The siblings of a group, or the responses to a labelled item. A judgement of several at once is shown with each
    of them.
    """
    if rows and rows[0].evaluation == LABELLED:
        return [read_response(run_dir, row) for row in rows]
    problems: dict[int, list[str]] = {row.sibling: [] for row in rows}
    recorded = {row.sibling: read_at(run_dir, row.line, decode_recorded, problems[row.sibling]) for row in rows}
    reports = {row.sibling: read_at(run_dir, row.report, decode_report, problems[row.sibling]) for row in rows}
    return [
        Sibling(
            row=row,
            recorded=recorded[row.sibling],
            report=reports[row.sibling],
            critiques=[*critiques_of_sibling(row.sibling, reports)],
            problems=problems[row.sibling],
        )
        for row in rows
    ]


def read_response(run_dir: Path, row: RolloutRow) -> Sibling:
    problems: list[str] = []
    found = read_at(run_dir, row.line, decode_item, problems)
    if found is None:
        return Sibling(row=row, recorded=None, report=None, critiques=[], problems=problems)
    prompt, item = found
    completion = Completion(
        token_ids=(), logprobs=(), text=item.responses[row.sibling], finish_reason="stop", versions=()
    )
    rollout = Rollout(
        group_id=item.item_id, sibling=row.sibling, turns=(Turn(new_ids=(), completion=completion),), status="finished"
    )
    return Sibling(
        row=row,
        recorded=Recorded(prompt=prompt, rollout=rollout),
        report=None,
        critiques=[*critiques_of_response(item, row.sibling)],
        problems=problems,
    )


def decode_item(record: dict[str, Any]) -> tuple[Prompt, ItemLine]:
    return decode(record["prompt"], Prompt), msgspec.convert(record, ItemLine)


def critiques_of_response(item: ItemLine, sibling: int) -> Iterator[Critique]:
    """The failed verdicts on it, then the judgements, then those that failed."""
    for name, verdicts in {"": item, **item.by_judge}.items():
        if cause := verdicts.failed.get(str(sibling)):
            yield Critique(text=f"no verdict: {cause}", score=None, judge=name)
    for said in item.judgements:
        if sibling in said.siblings:
            score = get_score(said.siblings, said.scores, sibling)
            scores = said.scores if len(said.siblings) == 1 else ()
            yield Critique(text=said.text, score=score, judge=said.judge, scores=scores, criteria=said.criteria)
    for failed in item.failures:
        if failed.sibling == sibling:
            yield Critique(text=f"failed: {words(failed)}", score=None, judge=failed.judge)


def read_at(run_dir: Path, key: int | None, read: Callable[[dict[str, Any]], T], problems: list[str]) -> T | None:
    """The line of a key; None, and words among the problems, if it can't be read."""
    if key is None:
        return None
    name, offset = place_of_key(key)
    try:
        with (run_dir / name).open("rb") as file:
            file.seek(offset)
            record = decode_line(file.readline(), f"{name}, at byte {offset}")
        if record.get(THINNED) == TEXT:
            problems.append(f"{name}: the text of this group was dropped (journals.keep); scores and lengths stay")
        return read(record)
    except (OSError, *UNREADABLE) as error:
        problems.append(f"{name}, at byte {offset}: {error}" if name not in str(error) else str(error))
        return None


def decode_recorded(record: dict[str, Any]) -> Recorded:
    return Recorded(prompt=decode(record["prompt"], Prompt), rollout=decode_rollout(record))


def critiques_of_sibling(sibling: int, reports: Mapping[int, JudgeReport | None]) -> Iterator[Critique]:
    """The failed verdicts on it, then the judgements, then those that failed."""
    own = reports[sibling]
    if own is not None:
        for name, part in {"": own, **own.by_judge}.items():
            if isinstance(part.verdict, Failed):
                yield Critique(text=f"no verdict: {words(part.verdict)}", score=None, judge=name)
            if part.criteria:
                version = "" if part.rubric_version is None else f"version {part.rubric_version} of the rubric, "
                yield Critique(text=version + describe_criteria(part.criteria), score=None, judge=name)
        if own.principles is not None:
            yield Critique(text=own.principles.text, score=None, judge="principles of the group")
    for other, report in reports.items():
        for name, part in (report.own_reports if report is not None else {}).items():
            yield from (show_judgement(one, sibling, name) for one in part.judgements if sibling in one.siblings)
            if other == sibling:
                yield from (show_failure(failure, name) for failure in part.failures)


def show_judgement(one: Judgement, sibling: int, judge: str) -> Critique:
    turn = None if one.turn is None else one.turn + 1
    score = get_score(one.siblings, one.scores, sibling)
    scores = one.scores if len(one.siblings) == 1 else ()
    text, criteria = show_results(one.completion), one.criteria
    return Critique(text=text, score=score, judge=judge, turn=turn, scores=scores, criteria=criteria)


def show_results(completion: Completion) -> str:
    """The text of a judgement, in which lines begin with `| ` that tools wrote, as in episodes before a judge."""
    shown, begin = "", 0
    for one in completion.tool_results:
        inserted = completion.text[one.text_start : one.text_end].strip("\n")
        shown += (
            completion.text[begin : one.text_start] + "".join(f"\n| {line}" for line in inserted.split("\n")) + "\n"
        )
        begin = one.text_end
    return shown + completion.text[begin:]


def show_failure(failure: Failed, judge: str) -> Critique:
    text = f"\n\n{show_results(failure.completion)}" if isinstance(failure, FailedJudgement) else ""
    turn = None if failure.turn is None else failure.turn + 1
    return Critique(text=f"failed: {words(failure)}{text}", score=None, judge=judge, turn=turn)


def words(failed: Failed | FailedLine) -> str:
    return " ".join(filter(None, (failed.cause, failed.detail)))
