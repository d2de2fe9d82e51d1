"""The error of a cascade's first judge where it is sure: what the run's audit estimates, and what the second judge says
about responses that the run didn't show it. Trains nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grmpipe.tiny.problems import judge_prompt, parse_score
from grmpipe.tiny.tiny_sampler import MAX_CRITIQUE_TOKENS, TinySampler

Record = Mapping[str, Any]
FIRST, THEN = "cheap", "judge"
UNSURE = (0.3, 0.7)  # as in conf/experiment/cascade.yaml
MAX_RESPONSES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A response that only the first judge saw, and its reward."""

    question: str
    text: str
    reward: float


def error_of_kept(run_dir: Path, then: Path) -> float:
    """The mean difference of both judges' rewards over responses that the run kept unaudited, spread over the run."""
    every = list(kept_responses(run_dir))
    some = every[:: -(-len(every) // MAX_RESPONSES)]
    critiques = TinySampler(then).answer(
        [judge_prompt(one.question, one.text) for one in some], MAX_CRITIQUE_TOKENS, seed=0
    )
    scored = [(one.reward, parse_score(critique)) for one, critique in zip(some, critiques, strict=True)]
    return fmean(abs(reward - (score - 1) / 9) for reward, score in scored if score is not None)


def kept_responses(run_dir: Path) -> Iterator[Kept]:
    """Of the groups in which the first judge was sure of every response, and which weren't audited."""
    rollouts = {(one["group_id"], one["sibling"]): one for one in lines(run_dir / "rollouts.jsonl")}
    for group in groups(lines(run_dir / "judgements.jsonl")):
        if not all(is_kept(report) for report in group):
            continue
        for report in group:
            rollout = rollouts[report["group_id"], report["sibling"]]
            question = rollout["prompt"]["messages"][0]["content"]
            yield Kept(question=question, text=rollout["turns"][0]["text"], reward=reward_of_first(report))


def groups(reports: Sequence[Record]) -> list[list[Record]]:
    by_id: dict[str, list[Record]] = defaultdict(list)
    for report in reports:
        by_id[report["group_id"]].append(report)
    return list(by_id.values())


def is_kept(report: Record) -> bool:
    asked = report.get("by_judge", {})
    if THEN in asked or "verdict" not in asked.get(FIRST, {}):
        return False
    return not UNSURE[0] <= reward_of_first(report) <= UNSURE[1]


def reward_of_first(report: Record) -> float:
    return sum(span["value"] for span in report["by_judge"][FIRST]["verdict"]["rewards"])


def lines(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
