"""The journals of a run: every rollout, every judgement, the end of each group, what was trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from grmpipe.judge.verdict import describe_verdict, get_reward, get_shown_score
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal, Mark, read_records
from grmpipe.observe.records import (
    THINNED,
    Record,
    decode,
    decode_report,
    decode_right,
    decode_rollout,
    decode_sampled,
    encode,
    encode_report,
    encode_rollout,
    pack_numbers,
)
from grmpipe.types import Failed, GroupEnd, JudgedCriterion, JudgeReport, Prompt, Rollout, TrainedRollout

ROLLOUTS, JUDGEMENTS, GROUPS, TRAINED = "rollouts.jsonl", "judgements.jsonl", "groups.jsonl", "trained.jsonl"


class Recorder:
    """Writes the journals, append-only. The operating system has a line when the call returns. I/O errors never
    surface: `failures` counts them by file. A rollout whose line could not be written gets no verdict on file either: a
    resume samples it again under its name, and would take that verdict for the new one's.

    `marks` is where the first lines of groups in flight begin: a resume reads from there.
    """

    def __init__(self, run_dir: Path, run_id: str = "", *, compact: bool = False, guard: Guard | None = None) -> None:
        """compact: pack the numbers of rollouts and judgements. guard: shared by all journals of the run."""
        self._compact = compact
        self._rollouts = Journal(run_dir / ROLLOUTS, run_id=run_id)
        self._judgements = Journal(run_dir / JUDGEMENTS, run_id=run_id)
        self._groups = Journal(run_dir / GROUPS, run_id=run_id)
        self._trained = Journal(run_dir / TRAINED, run_id=run_id)
        self._begins: dict[str, dict[str, Mark]] = {ROLLOUTS: {}, JUDGEMENTS: {}}  # journal -> group_id -> mark
        self._unwritten: set[tuple[str, int]] = set()  # group_id and sibling, of groups in flight
        self._guard = guard or Guard()
        self.failures = self._guard.failures

    def marks(self) -> dict[str, Mark]:
        """Journal -> the mark before which all groups have ended. A journal that can't be read has none."""
        found: dict[str, Mark] = {}
        for journal in self._journals:
            with self._guard.watch(journal.path.name):
                begins = self._begins.get(journal.path.name, {})
                found[journal.path.name] = (
                    min(begins.values(), key=lambda mark: mark.offset, default=None) or journal.mark()
                )
        return found

    def ends(self) -> dict[str, Mark]:
        """Journal of rollouts or judgements -> the mark after its last line. A journal that can't be read has none."""
        found: dict[str, Mark] = {}
        for journal in (self._rollouts, self._judgements):
            with self._guard.watch(journal.path.name):
                found[journal.path.name] = journal.mark()
        return found

    def go_on(self, marks: Mapping[str, Mark], group_ids: Iterable[str]) -> None:
        """Continue after a resume that read from `marks`: the lines of these groups may be anywhere after them."""
        for name, begins in self._begins.items():
            begins |= dict.fromkeys(group_ids, marks.get(name, Mark()))

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None:
        """`prompt_index`: the index of the prompt in the order of the data."""
        self._unwritten.add((rollout.group_id, rollout.sibling))
        with self._guard.watch(self._rollouts.path.name):
            self._note_begin(self._rollouts, rollout.group_id)
            record = encode_rollout(rollout) | {"prompt_index": prompt_index, "prompt": encode(prompt)}
            self._rollouts.append(pack_numbers(record) if self._compact else record)
            self._unwritten.discard((rollout.group_id, rollout.sibling))

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None:
        if (rollout.group_id, rollout.sibling) in self._unwritten:
            self.failures[JUDGEMENTS] += 1
            self._guard.causes.setdefault(JUDGEMENTS, f"its rollout could not be written to {ROLLOUTS}")
            return
        with self._guard.watch(self._judgements.path.name):
            who = {"group_id": rollout.group_id, "sibling": rollout.sibling}
            self._note_begin(self._judgements, rollout.group_id)
            record = {**who, **encode_report(report)}
            self._judgements.append(pack_numbers(record) if self._compact else record)

    def group_ended(self, end: GroupEnd) -> None:
        """Write the end of a group. The line holds only known fields: see GroupEnd."""
        self.forget(end.group_id)
        with self._guard.watch(self._groups.path.name):
            self._groups.append(without_unknown({**encode(end), "early": end.early or None}))

    def forget(self, group_id: str) -> None:
        """The group gets no further lines."""
        for begins in self._begins.values():
            begins.pop(group_id, None)
        self._unwritten = {key for key in self._unwritten if key[0] != group_id}

    def record_training(self, rollouts: Sequence[TrainedRollout]) -> None:
        """Write what a step trained, all lines or none. They hold only known fields: see TrainedRollout."""
        with self._guard.watch(self._trained.path.name):
            self._trained.extend([without_unknown(encode(rollout)) for rollout in rollouts])

    @property
    def _journals(self) -> tuple[Journal, ...]:
        return self._rollouts, self._judgements, self._groups, self._trained

    def _note_begin(self, journal: Journal, group_id: str) -> None:
        begins = self._begins[journal.path.name]
        if group_id not in begins:
            begins[group_id] = journal.mark()

    def adopt(self, drafts: Mapping[Path, int]) -> None:
        """Put thinned drafts in the places of rollouts and judgements. drafts: draft -> how many bytes of the journal
        it has; its name without the suffix is the journal's. Raises OSError.
        """
        for draft, copied in drafts.items():
            next(journal for journal in self._journals if journal.path.name == draft.stem).adopt(draft, copied)

    def close(self) -> None:
        for journal in self._journals:
            with self._guard.watch(journal.path.name):
                journal.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A line of rollouts.jsonl. thinned: what was dropped of it, numbers or text too; its ids are then unknown."""

    prompt_index: int
    prompt: Prompt
    rollout: Rollout
    thinned: str = ""

    def __repr__(self) -> str:
        return f"<RecordedRollout {describe_rollout(self.rollout)}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSibling:
    """A line of judgements.jsonl: what became of a rollout. If a rollout has several lines, the last one counts."""

    group_id: str
    sibling: int
    report: JudgeReport

    def __repr__(self) -> str:
        return f"<JudgedSibling {self.group_id}/{self.sibling}: {describe_verdict(self.report.verdict)}>"

    @property
    def reward(self) -> float | None:
        """None: the verdict failed, or the run has no rewards."""
        return get_reward(self.report.verdict)

    @property
    def score(self) -> float | None:
        """On the judge's scale; None: the verdict failed, or nobody judged."""
        return get_shown_score(self.report.verdict)

    @property
    def failed(self) -> str:
        """Why there is no verdict, in one word (docs/judging.md); empty: there is one."""
        return self.report.verdict.cause if isinstance(self.report.verdict, Failed) else ""

    @property
    def detail(self) -> str:
        """The failure in words, which may quote the judge; empty: there is a verdict."""
        return self.report.verdict.detail if isinstance(self.report.verdict, Failed) else ""

    @property
    def criteria(self) -> dict[str, float | None]:
        """How far each criterion of a rubric is met, from 0 to 1; None: its judgement failed. Of several judges under
        `<judge>/<name>`. Without those by which no sibling is judged.
        """
        return {name: one.met for name, one in self._named_criteria}

    @property
    def faults(self) -> list[str]:
        """The criteria that cost where they are met, by the names of `criteria`."""
        return [name for name, one in self._named_criteria if one.fault]

    @property
    def capped_by(self) -> list[str]:
        """The essential criteria that aren't met, so that the reward is at most `judge.rubric.essential_cap`."""
        return [name for name, one in self._named_criteria if one.caps]

    def encode_criteria(self) -> dict[str, object]:
        """What there is of a rubric, for JSON."""
        found = {"criteria": self.criteria, "faults": self.faults, "capped_by": self.capped_by}
        return {name: value for name, value in found.items() if value}

    @property
    def _named_criteria(self) -> list[tuple[str, JudgedCriterion]]:
        return [
            (f"{judge}/{one.name}".lstrip("/"), one)
            for judge, report in self.report.own_reports.items()
            for one in report.criteria
            if not one.left_out
        ]

    @property
    def critiques(self) -> tuple[str, ...]:
        """What the judges wrote."""
        return self.report.critiques


def describe_rollout(rollout: Rollout) -> str:
    """In a few words."""
    size = f"{len(rollout.turns)} turns, {rollout.num_sampled_tokens} tokens"
    return f"{rollout.group_id}/{rollout.sibling}: {rollout.status}, {size}"


def load_rollouts(path: Path, *, run_id: str = "", since: Mark | None = None) -> Iterator[RecordedRollout]:
    """Rollouts in the order they ended, read lazily: a long run's journal exceeds the memory. Otherwise like
    `read_records`.
    """
    return read_records(path, decode_recorded, run_id=run_id, since=since)


def load_verdicts(
    path: Path, *, run_id: str = "", since: Mark | None = None
) -> Iterator[tuple[tuple[str, int], JudgeReport]]:
    """((group_id, sibling), report) for each verdict. A rollout may be judged again: the later report counts."""
    return read_records(path, decode_judged, run_id=run_id, since=since)


def load_group_ends(path: Path, *, run_id: str = "", since: Mark | None = None) -> Iterator[GroupEnd]:
    """The ends of groups in their order. After a resume, ends after the checkpoint are void: the later line counts."""
    return read_records(path, decode_group_end, run_id=run_id, since=since)


def load_trained(path: Path, *, run_id: str = "") -> Iterator[TrainedRollout]:
    """The trained rollouts, step by step."""
    return read_records(path, decode_trained, run_id=run_id)


def without_unknown(record: Record) -> Record:
    return {key: value for key, value in record.items() if value is not None}


def decode_group_end(record: Record) -> GroupEnd:
    return msgspec.convert(record, GroupEnd)


def decode_trained(record: Record) -> TrainedRollout:
    return msgspec.convert({**record, "right": decode_right(record)}, TrainedRollout)


def decode_judged(record: Record) -> tuple[tuple[str, int], JudgeReport]:
    return msgspec.convert((record["group_id"], record["sibling"]), tuple[str, int]), decode_report(record)


def decode_recorded(record: Record) -> RecordedRollout:
    return RecordedRollout(
        prompt_index=msgspec.convert(record["prompt_index"], int),
        prompt=decode(record["prompt"], Prompt),
        rollout=decode_sampled(record),
        thinned=msgspec.convert(record.get(THINNED, ""), str),
    )


EVAL_ROLLOUTS, EVAL_JUDGEMENTS = "eval_rollouts.jsonl", "eval_judgements.jsonl"


# -- the journals of held-out evaluations: every answer and every verdict on one; no resume reads them -----------------


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
