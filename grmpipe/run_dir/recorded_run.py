"""The batches that a run trained, from its journals, in its order. Reads only.

groups.jsonl says which groups each step trained, in the order in which they were taken; rollouts.jsonl holds their
siblings, judgements.jsonl their verdicts.
"""

import io
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from grmpipe.config.io.rejudged_config import REJUDGED
from grmpipe.observe.journal import UNREADABLE, decode_line, describe_error, read_thinning
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, decode_recorded, load_group_ends
from grmpipe.observe.records import Record, decode_report
from grmpipe.types import Failed, GroupEnd, JudgedGroup, JudgeReport, Verdict

T = TypeVar("T")
Places = dict[str, dict[int, int]]  # group_id -> sibling -> offset of its line in bytes


class JournalLines:
    """The lines of a journal, read by their offsets: it may exceed the memory. They are those of the file as it was
    when it was opened, since a run that goes on may thin its journals.
    """

    def __init__(self, path: Path, wanted: Collection[str] | None = None) -> None:
        """wanted: groups; None: all. A file that isn't there has no lines."""
        self.path = path
        self._file = path.open("rb") if path.exists() else io.BytesIO()
        weakref.finalize(self, self._file.close)
        self.places = find_places(self._file, path, wanted)

    def read(self, group_id: str, sibling: int, decode: Callable[[Record], T]) -> T:
        """A line, decoded. ValueError names one that can't be read."""
        place = self.places[group_id][sibling]
        self._file.seek(place)
        record = decode_line(self._file.readline(), f"{self.path}, byte {place}")
        try:
            return decode(record)
        except UNREADABLE as error:
            raise ValueError(f"{self.path}, byte {place}: {describe_error(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroups:
    """Recorded groups with the verdicts of one file of judgements."""

    rollouts: JournalLines
    judgements: JournalLines

    def group(self, group_id: str) -> JudgedGroup:
        """A group with its verdicts. ValueError names the line that can't be read."""
        siblings, judged = sorted(self.rollouts.places[group_id]), self.judgements.places.get(group_id, {})
        recorded = [self.rollouts.read(group_id, sibling, decode_recorded) for sibling in siblings]
        reports = {sibling: self.judgements.read(group_id, sibling, decode_report) for sibling in judged}
        verdicts = {sibling: report.verdict for sibling, report in reports.items()}
        # A GRM in training may judge a group again: verdicts of its older version were void when the group ended.
        newest = max((verdict.grm_version for verdict in verdicts.values() if isinstance(verdict, Verdict)), default=0)
        return JudgedGroup(
            group_id=group_id,
            prompt=recorded[0].prompt,
            rollouts=tuple(line.rollout for line in recorded),
            verdicts=tuple(in_time(verdicts.get(line.rollout.sibling), newest) for line in recorded),
        )

    def reports(self) -> Iterator[JudgeReport]:
        """The reports of all groups, one in memory at a time. Of two on the same rollout the later."""
        for group_id, siblings in self.judgements.places.items():
            yield from (self.judgements.read(group_id, sibling, decode_report) for sibling in siblings)

    def are_judged(self, group_id: str) -> bool:
        """Whether all rollouts of a group were judged: they have a verdict, or its failure."""
        return self.rollouts.places[group_id].keys() <= self.judgements.places.get(group_id, {}).keys()

    def have_verdicts(self, group_id: str) -> bool:
        """Whether all rollouts of a group have a verdict that didn't fail."""
        return self.are_judged(group_id) and not any(isinstance(one, Failed) for one in self.group(group_id).verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The journals of a run; open it with `open_recorded`."""

    groups: RecordedGroups
    steps: tuple[tuple[GroupEnd, ...], ...]  # whole batches only

    @property
    def rollouts(self) -> Path:
        return self.groups.rollouts.path

    @property
    def group_size(self) -> int:
        return len(self.groups.rollouts.places[self.steps[0][0].group_id])

    @property
    def groups_per_batch(self) -> int:
        return len(self.steps[0])

    @property
    def max_staleness(self) -> int:
        """The largest staleness of the groups when they were trained."""
        return max(number - (end.version or 0) for number, ends in enumerate(self.steps) for end in ends)

    def batch(self, step: int) -> tuple[JudgedGroup, ...]:
        """The batch that made version `step`. ValueError names the line that can't be read."""
        return tuple(self.groups.group(end.group_id) for end in self.steps[step - 1])


def open_recorded(rollouts: Path) -> RecordedRun:
    """Open a run by its rollouts.jsonl or its directory, or by a folder of task=rejudge: then with the verdicts there.
    Torn last lines and an incomplete last batch are ignored, so a crashed run opens too. ValueError says what is
    missing.
    """
    rollouts, judgements = journals_at(rollouts)
    for needed in (rollouts, judgements, rollouts.with_name("groups.jsonl")):
        if not needed.exists():
            raise ValueError(
                f"there is no {needed}; give the rollouts.jsonl of a run, with its journals in the same folder"
            )
    if read_thinning(rollouts).until:
        raise ValueError(
            f"{rollouts} was thinned: journals.keep dropped the token ids of its first steps, without which nothing "
            "can be trained; give a run with journals.keep=all (task=rejudge judges what text there is)"
        )
    steps = read_trained_steps(rollouts.with_name("groups.jsonl"))
    trained = {end.group_id for ends in steps for end in ends}
    groups = RecordedGroups(rollouts=JournalLines(rollouts, trained), judgements=JournalLines(judgements, trained))
    run = RecordedRun(groups=groups, steps=steps)
    check_whole(run)
    if judgements.parent != rollouts.parent:
        check_all_judged(run)
    return run


def read_trained_steps(groups: Path) -> tuple[tuple[GroupEnd, ...], ...]:
    by_step: defaultdict[int, list[GroupEnd]] = defaultdict(list)
    for end in load_group_ends(groups):
        if end.outcome == "trained" and end.step is not None:
            by_step[end.step].append(end)
    numbers = sorted(by_step)
    steps = [tuple(by_step[step]) for step in numbers]
    while len(steps) > 1 and len(steps[-1]) < len(steps[0]):  # the run was killed between two lines
        steps.pop()
    if not steps or numbers[: len(steps)] != list(range(1, len(steps) + 1)):
        raise ValueError(f"{groups} has no steps from the first one on: nothing was trained, or lines are missing")
    if odd := next((number for number, ends in enumerate(steps, 1) if len(ends) != len(steps[0])), None):
        raise ValueError(f"{groups}: step {odd} has {len(steps[odd - 1])} groups, step 1 has {len(steps[0])}")
    return tuple(steps)


def journals_at(path: Path) -> tuple[Path, Path]:
    """The rollouts and the judgements of a run, given by its rollouts.jsonl or its directory; of a folder of
    task=rejudge, the rollouts of its run.
    """
    if path.absolute().parent.name == REJUDGED and path.is_dir():
        return path.absolute().parent.parent / ROLLOUTS, path / JUDGEMENTS
    rollouts = path / ROLLOUTS if path.is_dir() else path
    return rollouts, rollouts.with_name(JUDGEMENTS)


def find_places(file: BinaryIO, path: Path, wanted: Collection[str] | None) -> Places:
    """The offsets of the wanted lines. Of two lines for the same rollout the later counts."""
    places: Places = {}
    begin = 0
    for number, line in enumerate(file, start=1):
        if line.endswith(b"\n"):
            record = decode_line(line, f"{path}:{number}")
            group_id, sibling = record.get("group_id"), record.get("sibling")
            if not isinstance(group_id, str) or not isinstance(sibling, int):
                raise ValueError(f"{path}:{number}: has no group_id and sibling; is it the journal of a run?")
            if wanted is None or group_id in wanted:
                places.setdefault(group_id, {})[sibling] = begin
        begin += len(line)
    return places


def check_whole(run: RecordedRun) -> None:
    """Raise ValueError if a trained group lacks a sibling."""
    siblings: Sequence[int] = range(len(run.groups.rollouts.places.get(run.steps[0][0].group_id, ())))
    for number, ends in enumerate(run.steps, start=1):
        for end in ends:
            held = sorted(run.groups.rollouts.places.get(end.group_id, ()))
            if not held or held != list(siblings):
                raise ValueError(
                    f"{run.rollouts} lacks rollouts of group {end.group_id}, which was trained in step {number}: it "
                    f"holds siblings {held}"
                )


def check_all_judged(run: RecordedRun) -> None:
    """Raise ValueError if a trained group has no new verdicts."""
    trained = [end.group_id for ends in run.steps for end in ends]
    judged = sum(run.groups.are_judged(group_id) for group_id in trained)
    if judged < len(trained):
        raise ValueError(
            f"{run.groups.judgements.path} has the verdicts of {judged} of {len(trained)} trained groups; judge all of "
            "them, without rejudge.sample and rejudge.steps"
        )


def in_time(verdict: Verdict | Failed | None, grm_version: int) -> Verdict | Failed:
    """The verdict of a sibling when its group ended: without one by then, the failure of the deadline."""
    if verdict is None or (isinstance(verdict, Verdict) and verdict.grm_version != grm_version):
        return Failed(stage="judge", cause="timeout", attempts=1, detail="group deadline")
    return verdict
