"""The state of a run between two optimizer steps: saved with the weights, found again on resume."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
from grmpipe.pipeline.interfaces import KILLED_ENGINES, PipelineState, Prompts, RecoveredGroup
from grmpipe.types import GroupEnd, JudgeReport, Metrics, Prompt
from models.seeds import repeated_as


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run. Seeds are derived from names, so there is no random state to save."""

    pipeline_state: PipelineState
    wall_s: float  # so far, including before resumes
    eval_initial: Metrics
    totals: Mapping[str, object]  # of the counters
    busy_s: Mapping[str, float]
    alarms: tuple[str, ...] = ()
    wandb_run_id: str | None = None
    hacking_readings: tuple[tuple[int, float, float], ...] = ()  # (step, score, gold accuracy)
    judge_accuracy: Mapping[str, float] = field(default_factory=dict)  # on held-out prompts, by judge
    engines_replaced: Mapping[str, int] = field(default_factory=dict)  # by role
    moves: Mapping[str, int] = field(default_factory=dict)  # of elastic slots
    grm_pipeline_states: Mapping[str, PipelineState] = field(default_factory=dict)  # of GRMs in training, by role
    journal_marks: Mapping[str, Mark] = field(default_factory=dict)  # journal -> where a resume begins to read

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
        marks = values.get("journal_marks", {})
        values["journal_marks"] = {name: Mark(**mark) for name, mark in marks.items()}
        values["alarms"] = tuple(values["alarms"])
        values["hacking_readings"] = tuple((int(s), float(a), float(b)) for s, a, b in values["hacking_readings"])
        return RunState(**values)


def find_kept(
    run_dir: Path,
    pipeline_state: PipelineState,
    prompts: Prompts,
    run_id: str = "",
    marks: Mapping[str, Mark] | None = None,
) -> dict[int, RecoveredGroup]:
    """Finished work in the journals that is valid at a checkpoint, by prompt index.

    Rollouts sampled by versions up to the checkpoint are kept, with their verdicts. Later ones are void, and so are
    those of another prompt than the one at the index. A group with void work continues under a new group_id, so that no
    id has two meanings. run_id: lines of other runs don't count. marks: where groups in flight begin in the journals.
    """
    marks = marks or {}
    recorded: dict[int, list[RecordedRollout]] = {}
    for line in load_rollouts(run_dir / ROLLOUTS, run_id=run_id, since=marks.get(ROLLOUTS)):
        if line.prompt_index in pipeline_state.in_flight or line.prompt_index >= pipeline_state.next_prompt_index:
            recorded.setdefault(line.prompt_index, []).append(line)
    wanted = {line.rollout.group_id for lines in recorded.values() for line in lines}
    verdicts = load_verdicts(run_dir / JUDGEMENTS, run_id=run_id, since=marks.get(JUDGEMENTS))
    reports = {key: report for key, report in verdicts if key[0] in wanted}
    kept = {
        prompt_index: _kept(recorded[prompt_index], reports, pipeline_state, _drawn(prompts, prompt_index))
        for prompt_index in sorted(recorded)
    }
    ends = load_group_ends(run_dir / GROUPS, run_id=run_id, since=marks.get(GROUPS))
    return kept | {
        end.prompt_index: RecoveredGroup(group_id=end.group_id, killed_engines=True)
        for end in _killers(ends, pipeline_state)
    }


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
    lines: list[RecordedRollout],
    reports: Mapping[tuple[str, int], JudgeReport],
    pipeline_state: PipelineState,
    prompt: Prompt | None,
) -> RecoveredGroup:
    valid: dict[int, RecordedRollout] = {}
    for line in lines:
        if _newest_version(line) <= pipeline_state.version and line.prompt == prompt:
            valid.setdefault(line.rollout.sibling, line)
    names = list(dict.fromkeys(line.rollout.group_id for line in lines))
    renamed = len(valid) < len(lines)
    group_id = repeated_as(names[0], len(names)) if renamed else names[0]
    return RecoveredGroup(
        group_id=group_id,
        renamed=renamed,
        rollouts=tuple(dataclasses.replace(valid[sibling].rollout, group_id=group_id) for sibling in sorted(valid)),
        reports={
            sibling: report
            for sibling, line in valid.items()
            if (report := reports.get((line.rollout.group_id, sibling))) is not None and only_finite(report) is report
        },
    )


def _newest_version(line: RecordedRollout) -> int:
    return max(span.version for turn in line.rollout.turns for span in turn.completion.versions)
