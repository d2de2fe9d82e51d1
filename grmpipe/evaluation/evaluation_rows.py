"""The figures of task=evaluate and its labelled items as typed rows, read one by one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from grmpipe.evaluation.evaluation_files import JUDGE_RESULTS
from grmpipe.evaluation.policy_evaluation import RESULTS
from grmpipe.observe.journal import UNREADABLE, decode_what_can_be, describe_error
from grmpipe.observe.run_files import JUDGED


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLine:
    """A line of judged.jsonl: labelled work, and what the judge said.

    question: the prompt's last message.
    labels: the responses' true scores, or their grades: the higher the better.
    outcome: right, wrong, tied or failed.
    scores: on the judge's scale; failed: the causes. Both by the place of the response, from 0.
    """

    item_id: str
    subset: str
    question: str
    responses: tuple[str, ...]
    labels: tuple[float, ...]
    outcome: str
    scores: Mapping[int, float]
    failed: Mapping[int, str]
    critiques: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFigure:
    """A figure of an evaluation, with its 95 % interval.

    about: `policy` or `judge`. name: the prompts', or that of one of several judges; empty: all judges. part: the
    source of prompts, or the subset of labelled work; empty: all. count: how many prompts or items; without one the
    values are None.
    """

    about: str
    name: str
    part: str
    figure: str
    value: float | None
    low: float | None
    high: float | None
    count: int


def read_items(run_dir: Path) -> Iterator[JudgedLine]:
    """Lines that can't be read are left out, and logged by file and line."""
    return decode_what_can_be(run_dir / JUDGED, _item)


def read_figures(run_dir: Path) -> Iterator[EvaluationFigure]:
    """Those of policies, then those of judges. Raises ValueError, naming the file, if it can't be read."""
    for path, read in ((run_dir / RESULTS, _policy_figures), (run_dir / JUDGE_RESULTS, _judge_figures)):
        try:
            figures = [*read(json.loads(path.read_text(encoding="utf-8")))] if path.exists() else []
        except UNREADABLE as error:
            raise ValueError(f"{path}: {describe_error(error)}; evaluate again") from error
        yield from figures


def _policy_figures(policies: Mapping[str, Any]) -> Iterator[EvaluationFigure]:
    for prompts, policy in policies.items():
        for part, figures in {"": policy["overall"], **policy["by_source"]}.items():
            for figure, one in figures["figures"].items():
                yield EvaluationFigure(
                    about="policy", name=prompts, part=part, figure=figure, value=one["mean"], low=one["low"],
                    high=one["high"], count=one["num_clusters"],
                )  # fmt: skip


def _judge_figures(judges: Mapping[str, Any]) -> Iterator[EvaluationFigure]:
    for name, judge in {"": judges, **judges.get("by_judge", {})}.items():
        for part, subset in {"": judge["overall"], **judge["subsets"], **judge["sections"]}.items():
            for figure, one in _accuracies(subset):
                yield EvaluationFigure(
                    about="judge", name=name, part=part, figure=figure, value=one["accuracy"], low=one["low"],
                    high=one["high"], count=one["num_items"],
                )  # fmt: skip
        for figure, one in judge.get("figures", {}).items():
            yield EvaluationFigure(
                about="judge", name=name, part="", figure=figure, value=one["mean"], low=one["low"], high=one["high"],
                count=one["num_clusters"],
            )  # fmt: skip


def _accuracies(subset: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name as in summary.json, accuracy)."""
    yield "accuracy", subset["judged"]
    yield from ((f"accuracy_at_{k}", one) for k, one in subset["by_k"].items())
    yield from ((f"accuracy_with_meta_rm_at_{k}", one) for k, one in subset["with_meta_rm"].items())


def _item(line: Mapping[str, Any]) -> JudgedLine:
    known = {
        **line,
        "question": line["prompt"]["messages"][-1]["content"],
        "critiques": [judgement["text"] for judgement in line["judgements"]],
    }
    return msgspec.convert(known, JudgedLine, str_keys=True)
