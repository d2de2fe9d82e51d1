"""Finished work of a group that the counts of a checkpoint lack: what a resume keeps, and what it makes void. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from grmpipe.observe.recorder import RecordedRollout
from grmpipe.pipeline.interfaces import UncountedWork
from grmpipe.types import JudgeReport

T = TypeVar("T")
Counted = tuple[T, bool]  # a line of a journal, and whether the checkpoint has counted it
Key = tuple[str, int]  # group_id, sibling
Reports = Mapping[Key, Sequence[Counted[JudgeReport]]]  # in the order of the journal; a rollout may be judged again


def key_of(line: RecordedRollout) -> Key:
    return line.rollout.group_id, line.rollout.sibling


def uncounted_work(
    lines: Sequence[Counted[RecordedRollout]], kept: Mapping[int, RecordedRollout], reports: Reports
) -> UncountedWork:
    """lines: all rollouts of a prompt. kept: sibling -> the line that the resume keeps. reports: of these and others.

    Kept work that was written again under a new group_id is neither uncounted nor void: the first line counts.
    """
    uncounted = [line for line, is_counted in lines if not is_counted]
    originals = [key_of(line) for line in kept.values()]
    others = dict.fromkeys(key for line, _ in lines if (key := key_of(line)) not in originals)
    return UncountedWork(
        rollouts=tuple(line.rollout for line in uncounted if kept.get(line.rollout.sibling) is line),
        reports=tuple(report for key in originals for report in _uncounted_reports(reports, key)),
        void_rollouts=tuple(line.rollout for line in uncounted if not _repeats(line, kept.get(line.rollout.sibling))),
        void_reports=tuple(
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
    return original is not None and any(report == one for one, _ in reports.get(key_of(original), ()))
