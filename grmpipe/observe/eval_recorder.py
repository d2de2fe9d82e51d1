"""The journals of held-out evaluations: every answer, and every verdict on one. No resume reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from grmpipe.judge.verdict import describe_verdict, get_reward
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal, Mark, read_records
from grmpipe.observe.recorder import describe_rollout
from grmpipe.observe.records import (
    Record,
    decode,
    decode_report,
    decode_right,
    decode_rollout,
    encode,
    encode_report,
    encode_rollout,
    pack_numbers,
)
from grmpipe.types import JudgeReport, Prompt, Rollout

EVAL_ROLLOUTS, EVAL_JUDGEMENTS = "eval_rollouts.jsonl", "eval_judgements.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRollout:
    """A line of eval_rollouts.jsonl.

    prompts: the name of the evaluation: that of its prompts.
    step:    the run's step after which it took place; None in task=evaluate.
    sample:  which of the answers to the prompt; None: the greedy one.
    right:   how right the answer is by the rule, from 0 to 1; None without a reference that the rule can use.
    """

    prompts: str
    step: int | None
    sample: int | None
    right: float | None
    prompt: Prompt
    rollout: Rollout

    def __repr__(self) -> str:
        return f"<EvalRollout {describe_rollout(self.rollout)}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJudgement:
    """A line of eval_judgements.jsonl: the verdict on the answer of the same ids."""

    prompts: str
    step: int | None
    group_id: str
    sibling: int
    report: JudgeReport

    def __repr__(self) -> str:
        return f"<EvalJudgement {self.group_id}/{self.sibling}: {describe_verdict(self.report.verdict)}>"

    @property
    def reward(self) -> float | None:
        """None: the verdict failed, or the run has no rewards."""
        return get_reward(self.report.verdict)


class EvalRecorder:
    """Writes the journals of evaluations, append-only. I/O errors never surface: `failures` counts them by file.

    `marks` is where the last complete evaluation ended: a resume repeats what comes after it.
    """

    def __init__(self, run_dir: Path, run_id: str = "", *, compact: bool = False, guard: Guard | None = None) -> None:
        """compact: pack the numbers of answers and judgements. guard: shared by all journals of the run."""
        self._compact = compact
        self._rollouts = Journal(run_dir / EVAL_ROLLOUTS, run_id=run_id)
        self._judgements = Journal(run_dir / EVAL_JUDGEMENTS, run_id=run_id)
        self._guard = guard or Guard()
        self.failures = self._guard.failures
        self.marks = {EVAL_ROLLOUTS: Mark(), EVAL_JUDGEMENTS: Mark()}

    def of_evaluation(self, prompts: str, step: int | None = None) -> AnswerRecorder:
        return AnswerRecorder(self, prompts, step)

    def rollout(self, line: EvalRollout) -> None:
        with self._guard.watch(EVAL_ROLLOUTS):
            record = {
                **_evaluation(line.prompts, line.step),
                "sample": line.sample,
                "answer": line.rollout.answer,
                "right": line.right,
                **encode_rollout(line.rollout),
                "prompt": encode(line.prompt),
            }
            self._rollouts.append(pack_numbers(record) if self._compact else record)

    def record_verdict(self, line: EvalJudgement) -> None:
        with self._guard.watch(EVAL_JUDGEMENTS):
            record = {
                **_evaluation(line.prompts, line.step),
                "group_id": line.group_id,
                "sibling": line.sibling,
                "reward": get_reward(line.report.verdict),
                **encode_report(line.report),
            }
            self._judgements.append(pack_numbers(record) if self._compact else record)

    def evaluation_ended(self) -> None:
        """Note that an evaluation is complete: no resume repeats it."""
        for journal in (self._rollouts, self._judgements):
            with self._guard.watch(journal.path.name):
                self.marks[journal.path.name] = journal.mark()

    def go_on(self, marks: Mapping[str, Mark]) -> None:
        """Continue after a resume from `marks`."""
        self.marks |= {name: marks[name] for name in self.marks if name in marks}

    def close(self) -> None:
        for journal in (self._rollouts, self._judgements):
            with self._guard.watch(journal.path.name):
                journal.close()


@dataclass(frozen=True, slots=True)
class AnswerRecorder:
    """Records the answers of one evaluation."""

    recorder: EvalRecorder
    prompts: str
    step: int | None = None

    def rollout(self, prompt: Prompt, rollout: Rollout, sample: int | None, right: float | None) -> None:
        self.recorder.rollout(
            EvalRollout(
                prompts=self.prompts, step=self.step, sample=sample, right=right, prompt=prompt, rollout=rollout
            )
        )

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None:
        self.recorder.record_verdict(
            EvalJudgement(
                prompts=self.prompts,
                step=self.step,
                group_id=rollout.group_id,
                sibling=rollout.sibling,
                report=report,
            )
        )


def load_eval_rollouts(path: Path, *, run_id: str = "") -> Iterator[EvalRollout]:
    """The answers of all evaluations in the order they ended, read lazily. Otherwise like `read_records`."""
    return read_records(path, decode_eval_rollout, run_id=run_id)


def load_eval_judgements(path: Path, *, run_id: str = "") -> Iterator[EvalJudgement]:
    return read_records(path, decode_eval_judgement, run_id=run_id)


def decode_eval_rollout(record: Record) -> EvalRollout:
    return EvalRollout(
        prompts=msgspec.convert(record["prompts"], str),
        step=msgspec.convert(record.get("step"), int | None),
        sample=msgspec.convert(record["sample"], int | None),
        right=decode_right(record),
        prompt=decode(record["prompt"], Prompt),
        rollout=decode_rollout(record),
    )


def decode_eval_judgement(record: Record) -> EvalJudgement:
    return EvalJudgement(
        prompts=msgspec.convert(record["prompts"], str),
        step=msgspec.convert(record.get("step"), int | None),
        group_id=msgspec.convert(record["group_id"], str),
        sibling=msgspec.convert(record["sibling"], int),
        report=decode_report(record),
    )


def _evaluation(prompts: str, step: int | None) -> Record:
    return {"prompts": prompts, **({} if step is None else {"step": step})}
