"""What a run is between two optimizer steps: saved beside the weights, found again on resume."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grmpipe.flow import Cut, Kept
from grmpipe.observe.journal import read_journal, replace_journal
from grmpipe.observe.recorder import RecordedRollout, load_rollouts, load_verdicts
from grmpipe.types import JudgeReport, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One atomic cut. Seeds are derived from names, so there is no random state to keep."""

    cut: Cut
    wall_s: float  # so far, resumes included
    eval_initial: Metrics
    totals: Mapping[str, object]  # the tally's
    busy_s: Mapping[str, float]
    alarms: tuple[str, ...] = ()
    wandb_run_id: str | None = None
    hacking_readings: tuple[tuple[int, float, float], ...] = ()  # (step, score, gold accuracy)
    engines_replaced: Mapping[str, int] = field(default_factory=dict)  # by role
    moves: Mapping[str, int] = field(default_factory=dict)  # of elastic slots
    grm_cut: Cut | None = None  # of the flow of a GRM that learns too

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> RunState:
        values = json.loads(text)
        cut = values["cut"]
        cut["in_flight"] = {int(draw): group_id for draw, group_id in cut["in_flight"].items()}
        values["cut"] = Cut(**cut)
        if (grm_cut := values.get("grm_cut")) is not None:
            values["grm_cut"] = Cut(**grm_cut)
        values["alarms"] = tuple(values["alarms"])
        values["hacking_readings"] = tuple((int(s), float(a), float(b)) for s, a, b in values["hacking_readings"])
        return RunState(**values)


def find_kept(run_dir: Path, cut: Cut) -> dict[int, Kept]:
    """Finished work in the journals that is valid at a cut, by draw.

    Rollouts sampled by versions up to the cut are kept, with their verdicts; later ones are void. A draw with void work
    goes on under a new group_id, so that no name stands for two things.
    """
    recorded: dict[int, list[RecordedRollout]] = {}
    for line in load_rollouts(run_dir / "rollouts.jsonl"):
        if line.draw in cut.in_flight or line.draw >= cut.next_draw:
            recorded.setdefault(line.draw, []).append(line)
    wanted = {line.rollout.group_id for lines in recorded.values() for line in lines}
    reports = {key: report for key, report in load_verdicts(run_dir / "judgements.jsonl") if key[0] in wanted}
    return {draw: _kept(lines, reports, cut) for draw, lines in recorded.items()}


def void_group_ends(run_dir: Path, cut: Cut) -> None:
    """Take out of groups.jsonl what ended beyond the cut: those draws are in flight again, or not yet drawn."""
    path = run_dir / "groups.jsonl"
    if path.exists():
        ended = [line for line in read_journal(path) if line["draw"] < cut.next_draw]
        replace_journal(path, [line for line in ended if line["draw"] not in cut.in_flight])


def _kept(lines: list[RecordedRollout], reports: Mapping[tuple[str, int], JudgeReport], cut: Cut) -> Kept:
    valid: dict[int, RecordedRollout] = {}
    for line in lines:
        if _newest_version(line) <= cut.version:
            valid.setdefault(line.rollout.sibling, line)
    names = list(dict.fromkeys(line.rollout.group_id for line in lines))
    renamed = len(valid) < len(lines)
    group_id = f"{names[0].split('~')[0]}~{len(names)}" if renamed else names[0]
    return Kept(
        group_id=group_id,
        renamed=renamed,
        rollouts=tuple(dataclasses.replace(valid[sibling].rollout, group_id=group_id) for sibling in sorted(valid)),
        reports={
            sibling: reports[line.rollout.group_id, sibling]
            for sibling, line in valid.items()
            if (line.rollout.group_id, sibling) in reports
        },
    )


def _newest_version(line: RecordedRollout) -> int:
    return max(span.version for turn in line.rollout.turns for span in turn.completion.versions)
