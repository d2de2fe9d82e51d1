"""The files of a run as typed rows and Arrow tables. Each read starts from the beginning: of a run in progress it gives
more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from grmpipe.config.io.yaml_io import read_yaml
from grmpipe.config.run_config import RunConfig
from grmpipe.evaluation.evaluation_rows import EvaluationFigure, JudgedLine, read_figures, read_items
from grmpipe.observe.journal import decode_what_can_be
from grmpipe.observe.recorder import (
    EVAL_JUDGEMENTS,
    EVAL_ROLLOUTS,
    EvalJudgement,
    EvalRollout,
    JudgedSibling,
    RecordedRollout,
    load_eval_judgements,
    load_eval_rollouts,
    load_group_ends,
    load_rollouts,
    load_trained,
    load_verdicts,
)
from grmpipe.run_dir.identity import read_run_id
from grmpipe.types import Failed, GroupEnd, JudgeReport, Prompt, Rollout, TrainedRollout, Turn

if TYPE_CHECKING:
    import pyarrow as pa

Row = TypeVar("Row")
Record = dict[str, Any]
BATCH_ROWS = 1000
JUDGED = {"group_id": "string", "sibling": "int32", "reward": "double", "score": "double", "score_std": "double",
          "num_judgements": "int32", "grm_version": "int64", "failed": "string", "critiques": "texts"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTurn:
    """A turn of a rollout. turn: from 0."""

    group_id: str
    sibling: int
    turn: int
    content: Turn

    def __repr__(self) -> str:
        num_tokens = self.content.completion.num_tokens
        return f"<EpisodeTurn {self.group_id}/{self.sibling}, turn {self.turn}: {num_tokens} tokens>"


@dataclass(frozen=True, slots=True)
class RunTable(Generic[Row]):
    """Rows of one kind. Iterating reads them one by one; a journal may exceed the memory."""

    _read: Callable[[], Iterator[Row]]
    _record: Callable[[Row], Record]
    _columns: Mapping[str, str]  # name -> Arrow type; none: all found, float64

    def __iter__(self) -> Iterator[Row]:
        return self._read()

    def batches(self, rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """The rows in batches, for what doesn't fit the memory."""
        import pyarrow as pa

        schema, records = self._schema(), map(self._record, self._read())
        while batch := list(islice(records, rows)):
            yield _to_arrow(pa.RecordBatch, batch, schema)

    def to_arrow(self) -> pa.Table:
        """All rows as one table; `.to_pandas()` makes a data frame of it."""
        import pyarrow as pa

        return _to_arrow(pa.Table, [self._record(row) for row in self._read()], self._schema())

    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        types = {"ids": pa.list_(pa.int32()), "floats": pa.list_(pa.float32()), "texts": pa.list_(pa.string())}
        columns = self._columns or dict.fromkeys(("step", *sorted(_names(map(self._record, self._read())))), "double")
        return pa.schema(
            [(name, pa.int64() if name == "step" else types.get(kind) or pa.type_for_alias(kind))
             for name, kind in columns.items()]
        )  # fmt: skip


def _to_arrow(kind: Any, records: list[Record], schema: pa.Schema) -> Any:
    """A table or batch of these rows. Raises ValueError, naming the row, for a number that its column can't hold."""
    import pyarrow as pa

    try:
        return kind.from_pylist(records, schema=schema)
    except (pa.ArrowException, OverflowError) as error:
        if len(records) > 1:
            for record in records:
                _to_arrow(kind, [record], schema)
        ids = {name: records[0][name] for name in ("step", "group_id", "sibling", "item_id") if name in records[0]}
        raise ValueError(f"a value of the row {ids} doesn't fit its column ({error})") from error


def _names(records: Iterable[Record]) -> set[str]:
    return {name for record in records for name in record} - {"step"}


@dataclass(frozen=True, slots=True)
class RunReader:
    """A run's directory. A file that doesn't exist yet has no rows. docs/python.md lists the columns."""

    run_dir: Path

    @property
    def config(self) -> RunConfig:
        return read_yaml(self.run_dir / "config.yaml")

    @property
    def summary(self) -> Mapping[str, Any]:
        """summary.json; empty while the run goes on."""
        path = self.run_dir / "summary.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} can't be read ({error})") from error

    @property
    def metrics(self) -> RunTable[Mapping[str, float]]:
        """A row per line: a step's, or an evaluation's before the first and after the last step."""
        return RunTable(lambda: _metric_lines(self.run_dir), dict, {})

    @property
    def evaluations(self) -> RunTable[Mapping[str, float]]:
        """The held-out evaluations during the run: metrics without `eval/`."""
        return RunTable(lambda: _evaluations(_metric_lines(self.run_dir)), dict, {})

    @property
    def groups(self) -> RunTable[GroupEnd]:
        columns = {"group_id": "string", "prompt_index": "int64", "prompt_id": "string", "outcome": "string",
                   "step": "int64", "cause": "string", "version": "int64", "early": "bool"}  # fmt: skip
        return RunTable(lambda: self._there("groups.jsonl", load_group_ends), asdict, columns)

    @property
    def rollouts(self) -> RunTable[RecordedRollout]:
        columns = {"group_id": "string", "sibling": "int32", "prompt_id": "string", "prompt_index": "int64",
                   "question": "string", "reference": "string", "answer": "string", "status": "string",
                   "reason": "string", "num_turns": "int32", "num_tokens": "int32", "version": "int64",
                   "took_s": "double"}  # fmt: skip
        return RunTable(lambda: self._there("rollouts.jsonl", load_rollouts), _of_rollout, columns)

    @property
    def episodes(self) -> RunTable[EpisodeTurn]:
        """The rollouts, a row per turn."""
        columns = {"group_id": "string", "sibling": "int32", "turn": "int32", "text": "string", "token_ids": "ids",
                   "logprobs": "floats", "finish_reason": "string", "tool_calls": "texts", "replies": "texts",
                   "reward": "double", "faults": "texts", "env_s": "double"}  # fmt: skip
        return RunTable(lambda: _turns(self.rollouts), _of_turn, columns)

    @property
    def judgements(self) -> RunTable[JudgedSibling]:
        return RunTable(lambda: _judged(self._there("judgements.jsonl", load_verdicts)), _of_judged, JUDGED)

    @property
    def trained(self) -> RunTable[TrainedRollout]:
        columns = {"group_id": "string", "sibling": "int32", "step": "int64", "reward": "double", "advantage": "double",
                   "right": "double", "rollout_s": "double", "judging_s": "double"}  # fmt: skip
        return RunTable(lambda: self._there("trained.jsonl", load_trained), asdict, columns)

    @property
    def eval_rollouts(self) -> RunTable[EvalRollout]:
        """The answers of every held-out evaluation."""
        columns = {"prompts": "string", "step": "int64", "sample": "int32", "right": "double", "group_id": "string",
                   "sibling": "int32", "prompt_id": "string", "question": "string", "reference": "string",
                   "answer": "string", "status": "string", "reason": "string", "num_turns": "int32",
                   "num_tokens": "int32", "version": "int64", "took_s": "double"}  # fmt: skip
        return RunTable(lambda: self._there(EVAL_ROLLOUTS, load_eval_rollouts), _of_answer, columns)

    @property
    def eval_judgements(self) -> RunTable[EvalJudgement]:
        columns = {"prompts": "string", "step": "int64", **JUDGED}
        return RunTable(lambda: self._there(EVAL_JUDGEMENTS, load_eval_judgements), _of_eval_judgement, columns)

    @property
    def figures(self) -> RunTable[EvaluationFigure]:
        """What task=evaluate found; `evaluations` has the same by their names in the metrics."""
        columns = {"about": "string", "name": "string", "part": "string", "figure": "string", "value": "double",
                   "low": "double", "high": "double", "count": "int64"}  # fmt: skip
        return RunTable(lambda: read_figures(self.run_dir), asdict, columns)

    @property
    def judged_items(self) -> RunTable[JudgedLine]:
        """The labelled items that a judge was evaluated on."""
        columns = {"item_id": "string", "subset": "string", "question": "string", "responses": "texts",
                   "labels": "floats", "outcome": "string", "scores": "floats", "failed": "texts",
                   "critiques": "texts"}  # fmt: skip
        return RunTable(lambda: read_items(self.run_dir), _of_item, columns)

    def _there(self, name: str, load: Callable[..., Iterator[Row]]) -> Iterator[Row]:
        return load(self.run_dir / name, run_id=read_run_id(self.run_dir))


def _metric_lines(run_dir: Path) -> Iterator[Mapping[str, float]]:
    return decode_what_can_be(run_dir / "metrics.jsonl", _metric_line)


def _metric_line(record: Record) -> Mapping[str, float]:
    if "step" not in record:
        raise ValueError("it has no step")
    values: Mapping[str, float] = msgspec.convert(record, dict[str, int | float | None])
    return values


def _evaluations(lines: Iterable[Mapping[str, float]]) -> Iterator[Mapping[str, float]]:
    for line in lines:
        found = {name[5:]: value for name, value in line.items() if name.startswith("eval/")}
        if found:
            yield {"step": line["step"], **found}


def _turns(lines: Iterable[RecordedRollout]) -> Iterator[EpisodeTurn]:
    for one in (line.rollout for line in lines):
        for turn, content in enumerate(one.turns):
            yield EpisodeTurn(group_id=one.group_id, sibling=one.sibling, turn=turn, content=content)


def _judged(verdicts: Iterable[tuple[tuple[str, int], JudgeReport]]) -> Iterator[JudgedSibling]:
    for (group_id, sibling), report in verdicts:
        yield JudgedSibling(group_id=group_id, sibling=sibling, report=report)


def _of_rollout(line: RecordedRollout) -> Record:
    return {"prompt_index": line.prompt_index, **_of_played(line.prompt, line.rollout)}


def _of_answer(line: EvalRollout) -> Record:
    evaluation = {"prompts": line.prompts, "step": line.step, "sample": line.sample, "right": line.right}
    return evaluation | _of_played(line.prompt, line.rollout)


def _of_played(prompt: Prompt, one: Rollout) -> Record:
    spans = [span for turn in one.turns for span in turn.completion.versions]
    return {
        "group_id": one.group_id, "sibling": one.sibling, "prompt_id": prompt.prompt_id,
        "question": prompt.messages[-1].content if prompt.messages else "",
        "reference": prompt.reference, "answer": one.answer, "status": one.status, "reason": one.reason,
        "num_turns": len(one.turns), "num_tokens": sum(len(turn.completion.token_ids) for turn in one.turns),
        "version": min((span.version for span in spans), default=None), "took_s": one.took_s,
    }  # fmt: skip


def _of_turn(row: EpisodeTurn) -> Record:
    turn, completion = row.content, row.content.completion
    return {
        "group_id": row.group_id, "sibling": row.sibling, "turn": row.turn, "text": completion.text,
        "token_ids": completion.token_ids, "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason, "tool_calls": [call.name for call in turn.tool_calls],
        "replies": [str(message.content) for message in turn.replies],
        "reward": sum(turn.rewards.values()) if turn.rewards else None, "faults": turn.faults, "env_s": turn.env_s,
    }  # fmt: skip


def _of_item(row: JudgedLine) -> Record:
    siblings = sorted(row.scores.keys() | row.failed.keys())
    return {
        "item_id": row.item_id, "subset": row.subset, "question": row.question, "responses": row.responses,
        "labels": row.labels, "outcome": row.outcome,
        "scores": [row.scores.get(sibling) for sibling in siblings],
        "failed": [row.failed.get(sibling) for sibling in siblings], "critiques": row.critiques,
    }  # fmt: skip


def _of_eval_judgement(row: EvalJudgement) -> Record:
    return {"prompts": row.prompts, "step": row.step, **_of_judged(row)}


def _of_judged(row: JudgedSibling | EvalJudgement) -> Record:
    report, verdict = row.report, row.report.verdict
    record: Record = {"group_id": row.group_id, "sibling": row.sibling, "critiques": report.critiques}
    if isinstance(verdict, Failed):
        return record | {"failed": verdict.cause}
    if not verdict.rewards:
        return record
    return record | {
        "reward": verdict.outcome, "score": verdict.score, "score_std": verdict.score_std,
        "num_judgements": verdict.num_judgements, "grm_version": verdict.grm_version,
    }  # fmt: skip


def read_run(run_dir: str | Path) -> RunReader:
    """The files of a run, finished or in progress; `latest` names the newest. Raises ValueError if there is none."""
    if not (path := Path(run_dir)).is_dir():
        raise ValueError(f"there is no directory {path}; give a run's, such as runs/quickstart/latest")
    return RunReader(path.resolve())
