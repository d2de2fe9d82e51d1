"""The journals of a run: every rollout, every judgement, how each group ended. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal, read_journal
from grmpipe.observe.records import (
    Record,
    decode_prompt,
    decode_report,
    decode_rollout,
    encode_prompt,
    encode_report,
    encode_rollout,
)
from grmpipe.types import JudgeReport, Prompt, Rollout

Outcome = Literal["trained", "dropped"]


class Recorder:
    """Append-only; a line is with the operating system when the call returns. I/O errors never surface:
    `failures` counts them by file.
    """

    def __init__(self, run_dir: Path) -> None:
        self._rollouts = Journal(run_dir / "rollouts.jsonl")
        self._judgements = Journal(run_dir / "judgements.jsonl")
        self._groups = Journal(run_dir / "groups.jsonl")
        self._guard = Guard()
        self.failures = self._guard.failures

    def rollout(self, draw: int, prompt: Prompt, rollout: Rollout) -> None:
        """`draw`: the how-manieth prompt that the run took from its data."""
        with self._guard.watch(self._rollouts.path.name):
            record = encode_rollout(rollout)
            self._rollouts.append({**record, "draw": draw, "prompt": encode_prompt(prompt)})

    def judged(self, rollout: Rollout, report: JudgeReport) -> None:
        with self._guard.watch(self._judgements.path.name):
            who = {"group_id": rollout.group_id, "sibling": rollout.sibling}
            self._judgements.append({**who, **encode_report(report)})

    def group_ended(
        self,
        group_id: str,
        draw: int,
        prompt_id: str,
        outcome: Outcome,
        step: int | None = None,
        cause: str | None = None,
        version: int | None = None,
        early: bool = False,
    ) -> None:
        """Trained: at which step, sampled by which version at the oldest, and whether the learner went on with what it
        held before the next group came. Dropped: by which cause."""
        with self._guard.watch(self._groups.path.name):
            known = {"step": step, "cause": cause, "version": version, "early": early or None}
            ended = {"group_id": group_id, "draw": draw, "prompt_id": prompt_id, "outcome": outcome}
            self._groups.append({**ended, **{key: value for key, value in known.items() if value is not None}})

    def close(self) -> None:
        for journal in (self._rollouts, self._judgements, self._groups):
            with self._guard.watch(journal.path.name):
                journal.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A line of rollouts.jsonl."""

    draw: int
    prompt: Prompt
    rollout: Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnd:
    """A line of groups.jsonl, as `Recorder.group_ended` says. step and version are known of trained groups, the cause
    of dropped ones."""

    group_id: str
    draw: int
    prompt_id: str
    outcome: Outcome
    step: int | None = None
    cause: str | None = None
    version: int | None = None
    early: bool = False


def load_rollouts(path: Path) -> Iterator[RecordedRollout]:
    """In the order they ended. Lazily: a long run's journal is larger than memory."""
    return (decode_recorded(record) for record in read_journal(path))


def load_verdicts(path: Path) -> Iterator[tuple[tuple[str, int], JudgeReport]]:
    """((group_id, sibling), report); a rollout judged again comes again, the later report holds."""
    return (((record["group_id"], record["sibling"]), decode_report(record)) for record in read_journal(path))


def load_group_ends(path: Path) -> Iterator[GroupEnd]:
    """In the order they ended. After a resume, what was trained beyond the cut is void: the later line holds."""
    return (GroupEnd(**record) for record in read_journal(path))


def decode_recorded(record: Record) -> RecordedRollout:
    return RecordedRollout(draw=record["draw"], prompt=decode_prompt(record["prompt"]), rollout=decode_rollout(record))
