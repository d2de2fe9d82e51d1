"""The state of a run between two optimizer steps: saved with the weights, found again on resume."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from grmpipe.data.stream import EndOfData
from grmpipe.judge.verdict import only_finite
from grmpipe.observe.journal import Mark, mark_holds, read_records, replace_journal
from grmpipe.observe.recorder import (
    GROUPS,
    JUDGEMENTS,
    ROLLOUTS,
    RecordedRollout,
    load_group_ends,
    load_rollouts,
    load_verdicts,
)
from grmpipe.pipeline.interfaces import KILLED_ENGINES, PipelineState, Prompts, RecoveredGroup, UncountedWork
from grmpipe.run_dir.uncounted_work import Counted, Key, Reports, key_of, uncounted_work
from grmpipe.types import GroupEnd, JudgeReport, Prompt
from models.seeds import repeated_as

NOTHING_COUNTED = {ROLLOUTS: Mark(), JUDGEMENTS: Mark()}  # the marks of a run without a checkpoint

T = TypeVar("T")
Line = TypeVar("Line", covariant=True)


class Load(Protocol[Line]):
    """A reader of one journal."""

    def __call__(
        self, path: Path, *, run_id: str = "", since: Mark | None = None, until: Mark | None = None
    ) -> Iterator[Line]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run. Seeds are derived from names, so there is no random state to save."""

    pipeline_state: PipelineState = field(default_factory=PipelineState)
    wall_s: float = 0.0  # so far, including before resumes
    totals: Mapping[str, object] = field(default_factory=dict)  # counts of all closed steps
    busy_s: Mapping[str, float] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()
    run_id: str = ""
    grm_pipeline_states: Mapping[str, PipelineState] = field(default_factory=dict)  # of GRMs in training, by role
    journal_marks: Mapping[str, Mark] = field(default_factory=dict)  # journal -> where a resume begins to read
    open_counts: Mapping[str, object] = field(default_factory=dict)  # counts of the step after these
    features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # states of the run's features, by name
    trackers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # states of the run's trackers, by name
    counted_marks: Mapping[str, Mark] = field(default_factory=dict)  # journal -> its end when the counts were taken

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> RunState:
        values = json.loads(text)
        pipeline_state = values["pipeline_state"]
        pipeline_state["in_flight"] = {
            int(prompt_index): group_id for prompt_index, group_id in pipeline_state["in_flight"].items()
        }
        values["pipeline_state"] = PipelineState(**pipeline_state)
        grm_states = values.get("grm_pipeline_states", {})
        values["grm_pipeline_states"] = {role: PipelineState(**state) for role, state in grm_states.items()}
        for key in ("journal_marks", "counted_marks"):
            values[key] = {name: Mark(**mark) for name, mark in values.get(key, {}).items()}
        values["alarms"] = tuple(values["alarms"])
        return RunState(**values)


BEGINNING = RunState(counted_marks=NOTHING_COUNTED)  # of a run without a checkpoint


def find_kept(
    run_dir: Path,
    pipeline_state: PipelineState,
    prompts: Prompts,
    run_id: str = "",
    marks: Mapping[str, Mark] | None = None,
    counted_marks: Mapping[str, Mark] | None = None,
) -> dict[int, RecoveredGroup]:
    """Finished work in the journals that is valid at a checkpoint, by prompt index.

    Rollouts sampled by versions up to the checkpoint are kept, with their verdicts. Later ones are void, and so are
    those of another prompt than the one at the index. A group with void work continues under a new group_id, so that no
    id has two meanings. run_id: lines of other runs don't count. marks: where groups in flight begin in the journals.
    counted_marks: where the checkpoint's counts end in them; without a mark, its counts have all lines.
    """
    marks, counted_marks = marks or {}, counted_marks or {}
    recorded: dict[int, list[Counted[RecordedRollout]]] = {}
    rollouts = _counted(load_rollouts, run_dir / ROLLOUTS, run_id, marks, counted_marks)
    for line, is_counted in rollouts:
        if line.prompt_index in pipeline_state.in_flight or line.prompt_index >= pipeline_state.next_prompt_index:
            recorded.setdefault(line.prompt_index, []).append((line, is_counted))
    wanted = {line.rollout.group_id for lines in recorded.values() for line, _ in lines}
    reports: dict[Key, list[Counted[JudgeReport]]] = {}
    for (key, report), is_counted in _counted(load_verdicts, run_dir / JUDGEMENTS, run_id, marks, counted_marks):
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
    load: Load[T],
    path: Path,
    run_id: str,
    marks: Mapping[str, Mark],
    counted_marks: Mapping[str, Mark],
) -> Iterator[Counted[T]]:
    """The lines of a journal, each with whether the checkpoint has counted it."""
    since, counted = marks.get(path.name), counted_marks.get(path.name)
    if counted is not None and not mark_holds(path, counted):
        counted = None
    for line in load(path, run_id=run_id, since=since, until=counted):
        yield line, True
    if counted is not None:
        for line in load(path, run_id=run_id, since=counted):
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
        for end, record in read_records(path, lambda record: (GroupEnd(**record), record))
        if end.prompt_index < pipeline_state.next_prompt_index and end.prompt_index not in pipeline_state.in_flight
    ]
    replace_journal(path, past, run_id=run_id)


def _drawn(prompts: Prompts, prompt_index: int) -> Prompt | None:
    try:
        return prompts.at(prompt_index)
    except EndOfData:
        return None


def _kept(
    lines: Sequence[Counted[RecordedRollout]],
    reports: Reports,
    pipeline_state: PipelineState,
    prompt: Prompt | None,
) -> RecoveredGroup:
    valid: dict[int, RecordedRollout] = {}
    for line, _ in lines:
        if _newest_version(line) <= pipeline_state.version and line.prompt == prompt:
            valid.setdefault(line.rollout.sibling, line)
    names = list(dict.fromkeys(line.rollout.group_id for line, _ in lines))
    renamed = len(valid) < len(lines)
    group_id = repeated_as(names[0], len(names)) if renamed else names[0]
    return RecoveredGroup(
        group_id=group_id,
        renamed=renamed,
        rollouts=tuple(dataclasses.replace(valid[sibling].rollout, group_id=group_id) for sibling in sorted(valid)),
        reports={
            sibling: report
            for sibling, line in valid.items()
            if (report := _last_report(reports, line)) is not None and only_finite(report) is report
        },
        uncounted=uncounted_work(lines, valid, reports),
    )


def _last_report(reports: Reports, line: RecordedRollout) -> JudgeReport | None:
    """The last report on a rollout: it may have been judged again."""
    judged = reports.get(key_of(line), ())
    return judged[-1][0] if judged else None


def _newest_version(line: RecordedRollout) -> int:
    return max(span.version for turn in line.rollout.turns for span in turn.completion.versions)
