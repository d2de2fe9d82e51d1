"""The files of an earlier run as records: its requests, steps and spans. Interprets nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU = "/cpu_s"  # a metric of each step

Record = dict[str, Any]  # a line of a journal, an event of the timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of the timeline, with the name of its lane without the row. begun_s: time of its first token, if
    recorded.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Record
    begun_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The tokens of one request, from the journals."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """The times of one step. cpu_s: role (or driver) -> CPU seconds. requests: answered by engines."""

    step: int
    step_s: float
    requests: int
    cpu_s: Mapping[str, float]


def rollout_sizes(run_dir: Path) -> dict[str, list[Sizes]]:
    """`group/sibling` -> its turns."""
    return {
        f"{line['group_id']}/{line['sibling']}": [
            Sizes(prompt_tokens=length, new_tokens=len(turn["token_ids"]))
            for length, turn in zip(prompt_lengths(line["turns"]), line["turns"], strict=True)
        ]
        for line in json_lines(run_dir / "rollouts.jsonl")
    }


def prompt_lengths(turns: Sequence[Record]) -> list[int]:
    """Tokens of the whole prompt of each turn."""
    lengths, so_far = [], 0
    for turn in turns:
        lengths.append(len(turn["new_ids"]) + (0 if turn.get("rewritten") else so_far))
        so_far = lengths[-1] + len(turn["token_ids"])
    return lengths


def judgement_sizes(
    run_dir: Path, roles: Sequence[str], role_by_judge: Mapping[str, str]
) -> dict[str, dict[str, list[Sizes]]]:
    """Role of a model that judges -> `group/sibling` -> its judgements, including failed ones that have tokens.

    role_by_judge: of the run's judges, one of which a failed judgement names if there are several.
    """
    found: dict[str, dict[str, list[Sizes]]] = {role: {} for role in roles}
    for line in json_lines(run_dir / "judgements.jsonl"):
        seat = f"{line['group_id']}/{line['sibling']}"
        for one in [*line["judgements"], *line["failures"]] if line["judgements"] else ():
            if "completion" in one and (role := role_of(one, roles, role_by_judge)) in found:
                sizes = Sizes(prompt_tokens=len(one["prompt_ids"]), new_tokens=completion_tokens(one["completion"]))
                found[role].setdefault(seat, []).append(sizes)
    return found


def role_of(judgement: Record, roles: Sequence[str], role_by_judge: Mapping[str, str]) -> str:
    """The role of the model that wrote a judgement. One that failed names its judge only if there are several."""
    if "judge" in judgement:
        return role_by_judge.get(judgement["judge"], "")
    return judgement.get("grm", "") if len(roles) > 1 else "".join(roles)


def completion_tokens(completion: Record) -> int:
    """The number of tokens; a remote judge returns only that, no ids."""
    return len(completion["token_ids"]) or completion.get("unseen_tokens", 0)


def tokens_by_step(run_dir: Path, known: Mapping[str, list[Sizes]], prefix_sharing: bool) -> dict[int, int]:
    """Prompt and new tokens of the groups that each step trained, as the learner packs them."""
    of_group: Counter[str] = Counter()
    for seat, turns in known.items():
        group_id = seat.rsplit("/", 1)[0]
        # A later turn's prompt contains the earlier turns.
        whole = turns[-1].prompt_tokens + turns[-1].new_tokens
        of_group[group_id] += whole - (turns[0].prompt_tokens if prefix_sharing and group_id in of_group else 0)
    tokens: Counter[int] = Counter()
    for line in json_lines(run_dir / "groups.jsonl"):
        if line["outcome"] == "trained":
            tokens[line["step"]] += of_group[line["group_id"]]
    return tokens


def seconds_by_step(run_dir: Path) -> list[StepSeconds]:
    """The counted seconds of each step; empty if the run didn't count them."""
    return [
        StepSeconds(
            step=line["step"],
            step_s=line["time/step_s"],
            requests=int(line["rollout/finished"] + line["judge/asked"]),
            cpu_s={name.removesuffix(CPU): value for name, value in line.items() if name.endswith(CPU)},
        )
        for line in json_lines(run_dir / "metrics.jsonl")
        if f"driver{CPU}" in line
    ]


def json_lines(path: Path) -> Iterator[Record]:
    """The lines of a journal; a torn last one is ignored."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def read_spans(path: Path) -> Iterator[Span]:
    """The spans of timeline.json: one event per line; a killed run leaves out the end of the array."""
    titles: dict[tuple[int, int], str] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if not text.startswith("{") or not text.endswith("}"):
                continue
            event = json.loads(text)
            row = (event["pid"], event["tid"])
            if event["name"] == "thread_name" and event["ph"] == "M":
                titles[row] = event["args"]["name"].split(" · ")[0]
            elif event["ph"] == "X":
                start_s, args = event["ts"] / 1e6, event.get("args", {})
                yield Span(
                    lane=titles.get(row, ""),
                    name=event["name"],
                    start_s=start_s,
                    end_s=start_s + event["dur"] / 1e6,
                    args=args,
                    begun_s=start_s + args["first_token_s"] if "first_token_s" in args else None,
                )
