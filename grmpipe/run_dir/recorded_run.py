"""The batches that a run trained, from its journals, in its order. Reads only.

groups.jsonl says which groups each step trained, in the order in which they were taken; rollouts.jsonl holds their
siblings, judgements.jsonl their verdicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from grmpipe.observe.journal import decode_line
from grmpipe.observe.recorder import decode_recorded, load_group_ends
from grmpipe.observe.records import Record, decode_report
from grmpipe.types import Failed, GroupEnd, JudgedGroup, Verdict

T = TypeVar("T")
Places = dict[str, dict[int, int]]  # group_id -> sibling -> offset of its line in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The journals of a run; open it with `open_recorded`. Lines are read by their offsets: journals exceed the
    memory.
    """

    rollouts: Path
    steps: tuple[tuple[GroupEnd, ...], ...]  # whole batches only
    rollout_places: Places
    verdict_places: Places

    @property
    def group_size(self) -> int:
        return len(self.rollout_places[self.steps[0][0].group_id])

    @property
    def groups_per_batch(self) -> int:
        return len(self.steps[0])

    @property
    def max_staleness(self) -> int:
        """The largest staleness of the groups when they were trained."""
        return max(number - (end.version or 0) for number, ends in enumerate(self.steps) for end in ends)

    def batch(self, step: int) -> tuple[JudgedGroup, ...]:
        """The batch that made version `step`. ValueError names the line that can't be read."""
        return tuple(self._group(end.group_id) for end in self.steps[step - 1])

    def _group(self, group_id: str) -> JudgedGroup:
        rollouts = self.rollout_places[group_id]
        recorded = [read(self.rollouts, rollouts[sibling], decode_recorded) for sibling in sorted(rollouts)]
        judgements, places = judgements_beside(self.rollouts), self.verdict_places.get(group_id, {})
        reports = {sibling: read(judgements, place, decode_report) for sibling, place in places.items()}
        verdicts = {sibling: report.verdict for sibling, report in reports.items()}
        # A GRM in training may judge a group again: verdicts of its older version were void when the group ended.
        newest = max((verdict.grm_version for verdict in verdicts.values() if isinstance(verdict, Verdict)), default=0)
        return JudgedGroup(
            group_id=group_id,
            prompt=recorded[0].prompt,
            rollouts=tuple(line.rollout for line in recorded),
            verdicts=tuple(in_time(verdicts.get(line.rollout.sibling), newest) for line in recorded),
        )


def open_recorded(rollouts: Path) -> RecordedRun:
    """Open a run by its rollouts.jsonl or its directory. Torn last lines and an incomplete last batch are ignored, so a
    crashed run opens too. ValueError says what is missing.
    """
    rollouts = rollouts / "rollouts.jsonl" if rollouts.is_dir() else rollouts
    for needed in (rollouts, judgements_beside(rollouts), rollouts.with_name("groups.jsonl")):
        if not needed.exists():
            raise ValueError(
                f"there is no {needed}; give the rollouts.jsonl of a run, with its journals in the same folder"
            )
    steps = trained_steps(rollouts.with_name("groups.jsonl"))
    trained = {end.group_id for ends in steps for end in ends}
    run = RecordedRun(
        rollouts=rollouts,
        steps=steps,
        rollout_places=places_in(rollouts, trained),
        verdict_places=places_in(judgements_beside(rollouts), trained),
    )
    check_whole(run)
    return run


def trained_steps(groups: Path) -> tuple[tuple[GroupEnd, ...], ...]:
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


def places_in(path: Path, wanted: Collection[str]) -> Places:
    """The offsets of the wanted lines. Of two lines for the same rollout the later counts."""
    places: Places = {}
    begin = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                record = decode_line(line, f"{path}:{number}")
                group_id, sibling = record.get("group_id"), record.get("sibling")
                if not isinstance(group_id, str) or not isinstance(sibling, int):
                    raise ValueError(f"{path}:{number}: has no group_id and sibling; is it the journal of a run?")
                if group_id in wanted:
                    places.setdefault(group_id, {})[sibling] = begin
            begin += len(line)
    return places


def check_whole(run: RecordedRun) -> None:
    """Raise ValueError if a trained group lacks a sibling."""
    siblings: Sequence[int] = range(len(run.rollout_places.get(run.steps[0][0].group_id, ())))
    for number, ends in enumerate(run.steps, start=1):
        for end in ends:
            held = sorted(run.rollout_places.get(end.group_id, ()))
            if not held or held != list(siblings):
                raise ValueError(
                    f"{run.rollouts} lacks rollouts of group {end.group_id}, which was trained in step {number}: it "
                    f"holds siblings {held}"
                )


def judgements_beside(rollouts: Path) -> Path:
    return rollouts.with_name("judgements.jsonl")


def in_time(verdict: Verdict | Failed | None, grm_version: int) -> Verdict | Failed:
    """The verdict of a sibling when its group ended: without one by then, the failure of the deadline."""
    if verdict is None or (isinstance(verdict, Verdict) and verdict.grm_version != grm_version):
        return Failed(stage="judge", cause="timeout", attempts=1, detail="group deadline")
    return verdict


def read(path: Path, place: int, decode: Callable[[Record], T]) -> T:
    """One line at an offset, decoded."""
    with path.open("rb") as file:
        file.seek(place)
        record = decode_line(file.readline(), f"{path}, byte {place}")
    try:
        return decode(record)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}, byte {place}: not a line of this journal ({error!r})") from error
