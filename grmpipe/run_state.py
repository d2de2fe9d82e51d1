"""What a run is between two optimizer steps: saved beside the weights, found again on resume."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grmpipe.flow import KILLED_ENGINES, Cut, Kept
from grmpipe.observe.journal import read_journal, replace_journal
from grmpipe.observe.recorder import GroupEnd, RecordedRollout, load_group_ends, load_rollouts, load_verdicts
from grmpipe.types import JudgeReport, Metrics

STATE_FILE = "run_state.json"
LATEST_FILE = "latest"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """`checkpoints/step_N/` of a run, and the file that names the latest whole one."""

    directory: Path
    keep: int

    def draft(self, step: int) -> Path:
        """An empty directory to write a checkpoint into."""
        draft = self.directory / f"step_{step}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return draft

    def publish(self, draft: Path, state: RunState) -> Path:
        """Make a draft the latest checkpoint: a rename, then the rename of the file that names it."""
        (draft / STATE_FILE).write_text(state.to_json(), encoding="utf-8")
        whole = draft.with_suffix("")
        shutil.rmtree(whole, ignore_errors=True)
        draft.rename(whole)
        pointer = self.directory / f"{LATEST_FILE}.draft"
        pointer.write_text(whole.name, encoding="utf-8")
        pointer.replace(self.directory / LATEST_FILE)
        self._forget_old(whole)
        return whole

    def latest(self) -> Path | None:
        """The last whole checkpoint."""
        pointer = self.directory / LATEST_FILE
        if not pointer.exists():
            return None
        return self.directory / pointer.read_text(encoding="utf-8").strip()

    def load(self, checkpoint: Path) -> RunState:
        return RunState.from_json((checkpoint / STATE_FILE).read_text(encoding="utf-8"))

    def _forget_old(self, newest: Path) -> None:
        whole = [path for path in self.directory.glob("step_*") if path.suffix != ".draft" and path != newest]
        whole.sort(key=lambda path: int(path.name.removeprefix("step_")))
        for path in whole[: max(0, len(whole) - self.keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)


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
    kept = {draw: _kept(lines, reports, cut) for draw, lines in recorded.items()}
    return kept | {end.draw: Kept(group_id=end.group_id, killed_engines=True) for end in _killers(run_dir, cut)}


def _killers(run_dir: Path, cut: Cut) -> list[GroupEnd]:
    """Groups whose requests killed engines: drawn again, they are dropped at once."""
    path = run_dir / "groups.jsonl"
    ends = load_group_ends(path) if path.exists() else ()
    drawn_again = (end for end in ends if end.draw in cut.in_flight or end.draw >= cut.next_draw)
    return [end for end in drawn_again if end.cause == KILLED_ENGINES]


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
