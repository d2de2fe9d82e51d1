"""Finished work in the journals of a run: what a resume keeps, what it makes void, and what of both the checkpoint's
counts lack.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from grmpipe.data.stream import EndOfData, NothingToJudge
from grmpipe.judge.verdict import only_finite
from grmpipe.models.seeds import name_repetition
from grmpipe.observe.all_trackers import is_up_to
from grmpipe.observe.journal import Mark, locate, mark_holds, read_records, read_what_can_be, replace_journal
from grmpipe.observe.recorder import (
    EVAL_JUDGEMENTS,
    EVAL_ROLLOUTS,
    GROUPS,
    JUDGEMENTS,
    ROLLOUTS,
    TRAINED,
    RecordedRollout,
    decode_group_end,
    decode_judged,
    decode_recorded,
    load_group_ends,
)
from grmpipe.observe.records import Record
from grmpipe.pipeline.interfaces import KILLED_ENGINES, PipelineState, Prompts, RecoveredGroup, UncountedWork
from grmpipe.run_dir.run_state import RunState
from grmpipe.types import GroupEnd, JudgeReport, Prompt, Verdict

log = logging.getLogger(__name__)

# The state of a run without a checkpoint: nothing in the journals is counted, no step stands.
BEGINNING = RunState(
    counted_marks={ROLLOUTS: Mark(), JUDGEMENTS: Mark()},
    journal_marks={TRAINED: Mark(), EVAL_ROLLOUTS: Mark(), EVAL_JUDGEMENTS: Mark()},
)

T = TypeVar("T")
Counted = tuple[T, bool]  # a line of a journal, and whether the checkpoint has counted it
Key = tuple[str, int]  # group_id, sibling
Reports = Mapping[Key, Sequence[Counted[JudgeReport]]]  # in the order of the journal; a rollout may be judged again


def find_kept(
    run_dir: Path,
    pipeline_state: PipelineState,
    prompts: Prompts,
    run_id: str = "",
    marks: Mapping[str, Mark] | None = None,
    counted_marks: Mapping[str, Mark] | None = None,
) -> dict[int, RecoveredGroup]:
    """Finished work in the journals that is valid at a checkpoint, by prompt index.

    Rollouts sampled by versions up to the checkpoint are kept, with their verdicts by versions of the judge up to it.
    Later ones are void, and so are those of another prompt than the one at the index. A group with void work continues
    under a new group_id, so that no id has two meanings. run_id: lines of other runs don't count. marks: where groups
    in flight begin in the journals. counted_marks: where the checkpoint's counts end in them; without a mark, its
    counts have all lines.
    """
    marks, counted_marks = marks or {}, counted_marks or {}
    recorded: dict[int, list[Counted[RecordedRollout]]] = {}
    rollouts = _counted(decode_recorded, run_dir / ROLLOUTS, run_id, marks, counted_marks)
    for line, is_counted in rollouts:
        # All other groups are over: the checkpoint has them as trained or dropped.
        if line.prompt_index in pipeline_state.in_flight or line.prompt_index >= pipeline_state.next_prompt_index:
            recorded.setdefault(line.prompt_index, []).append((line, is_counted))
    wanted = {line.rollout.group_id for lines in recorded.values() for line, _ in lines}
    reports: dict[Key, list[Counted[JudgeReport]]] = {}
    for (key, report), is_counted in _counted(decode_judged, run_dir / JUDGEMENTS, run_id, marks, counted_marks):
        if key[0] in wanted:
            reports.setdefault(key, []).append((report, is_counted))
    kept = {
        prompt_index: _kept(recorded[prompt_index], reports, pipeline_state, _drawn(prompts, prompt_index))
        for prompt_index in sorted(recorded)
    }
    ends = load_group_ends(run_dir / GROUPS, run_id=run_id, since=marks.get(GROUPS))
    return kept | {
        end.prompt_index: RecoveredGroup(
            group_id=end.group_id,
            killed_engines=True,
            uncounted=kept[end.prompt_index].uncounted if end.prompt_index in kept else UncountedWork(),
        )
        for end in _killers(ends, pipeline_state)
    }


def _counted(
    decode: Callable[[Record], T],
    path: Path,
    run_id: str,
    marks: Mapping[str, Mark],
    counted_marks: Mapping[str, Mark],
) -> Iterator[Counted[T]]:
    """The lines of a journal, each with whether the checkpoint has counted it."""
    since, counted = (found and locate(path, found) for found in (marks.get(path.name), counted_marks.get(path.name)))
    if counted is not None and not mark_holds(path, counted):
        counted = None
    for line in read_records(path, decode, run_id=run_id, since=since, until=counted):
        yield line, True
    if counted is not None:
        for line in read_records(path, decode, run_id=run_id, since=counted):
            yield line, False


def _killers(ends: Iterable[GroupEnd], pipeline_state: PipelineState) -> list[GroupEnd]:
    """Groups whose requests killed engines: when reopened, they are dropped at once."""
    drawn_again = (
        end
        for end in ends
        if end.prompt_index in pipeline_state.in_flight or end.prompt_index >= pipeline_state.next_prompt_index
    )
    return [end for end in drawn_again if end.cause == KILLED_ENGINES]


def void_group_ends(run_dir: Path, pipeline_state: PipelineState, run_id: str = "", mark: Mark | None = None) -> None:
    """Remove from groups.jsonl the groups that ended after the checkpoint: their prompts are in flight again, or not
    yet used.

    mark: the end of the file at the checkpoint.
    """
    path = run_dir / GROUPS
    if not path.exists():
        return
    if mark is not None and mark_holds(path, mark):
        with path.open("r+b") as file:
            file.truncate(mark.offset)
        return
    past = [
        record
        for end, record in read_records(path, lambda record: (decode_group_end(record), record))
        if end.prompt_index < pipeline_state.next_prompt_index and end.prompt_index not in pipeline_state.in_flight
    ]
    replace_journal(path, past, run_id=run_id)


def void_steps_after(run_dir: Path, version: int, marks: Mapping[str, Mark], run_id: str = "") -> None:
    """Remove what the steps and evaluations after a checkpoint wrote: they are made again.

    marks: the ends of the files at the checkpoint. Without one that holds, lines of later steps than its version are
    removed. An error of the disk fails no resume.
    """
    for name in (TRAINED, EVAL_ROLLOUTS, EVAL_JUDGEMENTS):
        path, mark = run_dir / name, marks.get(name)
        if not path.exists():
            continue
        try:
            if mark is not None and mark_holds(path, mark):
                os.truncate(path, mark.offset)
            else:
                kept = (record for record in read_what_can_be(path) if is_up_to(record.get("step"), version))
                replace_journal(path, kept, run_id=run_id)
        except OSError as error:
            log.warning("%s keeps lines from after the checkpoint: it can't be rewritten (%s)", path, error)


def _drawn(prompts: Prompts, prompt_index: int) -> Prompt | None:
    try:
        return prompts.at(prompt_index)
    except (EndOfData, NothingToJudge):
        return None


def _kept(
    lines: Sequence[Counted[RecordedRollout]],
    reports: Reports,
    pipeline_state: PipelineState,
    prompt: Prompt | None,
) -> RecoveredGroup:
    valid: dict[int, RecordedRollout] = {}
    for line, _ in lines:
        # Valid at the checkpoint: without tokens of later versions, for the prompt that is drawn here now, and with the
        # log-probs to train it, which thinning drops. The first line counts: a renamed group writes its work again.
        if _newest_version(line) <= pipeline_state.version and line.prompt == prompt and not line.thinned:
            valid.setdefault(line.rollout.sibling, line)
    names = list(dict.fromkeys(line.rollout.group_id for line, _ in lines))
    renamed = len(valid) < len(lines)
    group_id = name_repetition(names[0], len(names)) if renamed else names[0]
    return RecoveredGroup(
        group_id=group_id,
        renamed=renamed,
        rollouts=tuple(dataclasses.replace(valid[sibling].rollout, group_id=group_id) for sibling in sorted(valid)),
        reports={
            sibling: report
            for sibling, line in valid.items()
            if (report := _last_report(reports, line)) is not None
            and only_finite(report) is report  # a judge's nan may be in a journal: that rollout is judged again
            and is_by_judge_up_to(report, pipeline_state.judge_version)
        },
        uncounted=sum_uncounted_work(lines, valid, reports, pipeline_state.judge_version),
    )


def is_by_judge_up_to(report: JudgeReport, version: int) -> bool:
    """Whether no later version of the judge gave the verdict: a resume puts a judge in training back, too."""
    return not isinstance(report.verdict, Verdict) or report.verdict.grm_version <= version


def _last_report(reports: Reports, line: RecordedRollout) -> JudgeReport | None:
    """The last report on a rollout: it may have been judged again."""
    judged = reports.get(get_key(line), ())
    return judged[-1][0] if judged else None


def _newest_version(line: RecordedRollout) -> int:
    return max(span.version for turn in line.rollout.turns for span in turn.completion.versions)


def get_key(line: RecordedRollout) -> Key:
    return line.rollout.group_id, line.rollout.sibling


def sum_uncounted_work(
    lines: Sequence[Counted[RecordedRollout]],
    kept: Mapping[int, RecordedRollout],
    reports: Reports,
    judge_version: int,
) -> UncountedWork:
    """lines: all rollouts of a prompt. kept: sibling -> the line that the resume keeps. reports: on these and others.
    judge_version: at the checkpoint.

    Kept work that was written again under a new group_id is neither uncounted nor void: the first line counts.
    """
    uncounted = [line for line, is_counted in lines if not is_counted]
    originals = [get_key(line) for line in kept.values()]
    others = dict.fromkeys(key for line, _ in lines if (key := get_key(line)) not in originals)
    of_kept = [report for key in originals for report in _uncounted_reports(reports, key)]
    put_back = tuple(report for report in of_kept if not is_by_judge_up_to(report, judge_version))
    return UncountedWork(
        rollouts=tuple(line.rollout for line in uncounted if kept.get(line.rollout.sibling) is line),
        reports=tuple(report for report in of_kept if is_by_judge_up_to(report, judge_version)),
        void_rollouts=tuple(line.rollout for line in uncounted if not _repeats(line, kept.get(line.rollout.sibling))),
        void_reports=put_back
        + tuple(
            report
            for key in others
            for report in _uncounted_reports(reports, key)
            if not _is_of_another_name(report, kept.get(key[1]), reports)
        ),
    )


def _uncounted_reports(reports: Reports, key: Key) -> list[JudgeReport]:
    return [report for report, is_counted in reports.get(key, ()) if not is_counted]


def _repeats(line: RecordedRollout, original: RecordedRollout | None) -> bool:
    """Whether a line is the kept one, or repeats it under another group_id."""
    if original is None:
        return False
    return line.rollout == dataclasses.replace(original.rollout, group_id=line.rollout.group_id)


def _is_of_another_name(report: JudgeReport, original: RecordedRollout | None, reports: Reports) -> bool:
    """Whether a report repeats one of the kept rollout."""
    return original is not None and any(report == one for one, _ in reports.get(get_key(original), ()))
