"""An earlier run's files, read for what its work took: costs and lengths. Writes nothing.

Engines are fitted to the spans of their requests, the learner to its spans and the tokens of each step. A lane of the
timeline holds so many rows; requests that it left out are put beside their neighbours, as long as their tokens take.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from grmpipe.config import ConfigError, RunConfig, read_yaml
from grmpipe.engines import engine_config_of
from models.settings import OpenAIConfig
from scheduler.cost import LearnerSpeed
from scheduler.fit import EngineFit, Request, fit_engine, fit_learner

Record = dict[str, Any]  # of this file only: a line of a journal, an event of the timeline

WARM_UP_STEPS = 1  # allocations and compilations of a first step are no cost of the others
MIN_CLEAR = 40  # requests that nothing interrupted; with fewer, the others are taken as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Means over a role's requests."""

    prompt_tokens: float
    new_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What could be measured. What couldn't is absent, and `notes` say why."""

    config: RunConfig  # of that run
    engines: Mapping[str, EngineFit]
    lengths: Mapping[str, Lengths]
    learner: LearnerSpeed | None
    sync_s: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of the timeline, under the name of its lane, whatever its row."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One request as the journals know it."""

    prompt_tokens: int
    new_tokens: int


def read_profile(path: str) -> Profile:
    """Raises ConfigError where there is no run to read."""
    run_dir = Path(path).parent if path.endswith(".json") else Path(path)
    for name in ("timeline.json", "config.yaml", "rollouts.jsonl"):
        if not (run_dir / name).is_file():
            raise ConfigError(f"plan.profile: {run_dir} holds no {name}; give the directory of a run, or its timeline")
    config = read_yaml(run_dir / "config.yaml")
    spans = list(read_spans(run_dir / "timeline.json"))
    known = {"policy": rollout_sizes(run_dir), "grm": judgement_sizes(run_dir)}
    notes: list[str] = []
    roles = [role for role in ("policy", "grm") if any(span.name == role for span in spans)]
    engines = {}
    for role in roles:
        fit, said = engine_of(role, spans, known[role], config)
        notes += said
        if fit is not None:
            engines[role] = fit
    learner, said = learner_of(spans, run_dir, known["policy"])
    pushes = [span.end_s - span.start_s for span in spans if span.lane == "weight sync"][WARM_UP_STEPS:]
    if not pushes:
        said.append("sync: fewer than two pushes of weights")
    lengths = {role: mean_lengths(known[role]) for role in roles if known[role]}
    return Profile(
        config=config,
        engines=engines,
        lengths=lengths,
        learner=learner,
        sync_s=median(pushes) if pushes else None,
        notes=(*notes, *said),
    )


# -- engines -------------------------------------------------------------------------------------------------------


def engine_of(
    role: str, spans: Sequence[Span], known: Mapping[str, list[Sizes]], config: RunConfig
) -> tuple[EngineFit | None, list[str]]:
    """A role's speed, from its requests on all of its engines."""
    seen = [span for span in spans if span.name == role and span.args.get("num_tokens", 0) > 0]
    counted = {span.args["request"] for span in undisturbed(seen, role, spans, config)}
    hidden = list(left_out(seen, known))
    usual = round(mean_lengths(known).prompt_tokens) if known else 0
    lanes: dict[str, list[Request]] = defaultdict(list)
    for span in [*seen, *hidden]:
        sizes = known.get(seat_of(span))
        request = Request(
            start_s=span.start_s,
            end_s=span.end_s,
            prompt_tokens=sizes[0].prompt_tokens if sizes else usual,
            new_tokens=span.args["num_tokens"],
            counts=span.args["request"] in counted,
        )
        lanes[span.lane].append(request)
    engine = engine_config_of(role, config)
    fit = fit_engine(list(lanes.values()), 1 << 30 if isinstance(engine, OpenAIConfig) else engine.max_batch_rows)
    notes = [] if fit else [f"{role}: too few requests in the timeline to tell its speed"]
    if hidden:
        notes.append(f"{role}: {len(hidden)} of {len(seen) + len(hidden)} requests had no row in the timeline")
    return fit, notes


def undisturbed(seen: Sequence[Span], role: str, spans: Sequence[Span], config: RunConfig) -> Sequence[Span]:
    """Requests of a warm engine that no push stopped, and no learner on the same slots slowed down; as far as there
    are enough of them."""
    roles = config.placement.roles
    shares = role in roles and "learner" in roles and roles[role].pool == roles["learner"].pool
    first_step = min((span.end_s for span in spans if span.name.startswith("step ")), default=0.0)
    lanes = [("weight sync", "learner"), ("weight sync",)] if shares else [("weight sync",)]
    for disturbing in lanes:
        others = [span for span in spans if span.lane in disturbing]
        clear = [
            span
            for span in seen
            if span.start_s > first_step and not any(o.start_s < span.end_s and span.start_s < o.end_s for o in others)
        ]
        if len(clear) >= MIN_CLEAR:
            return clear
    return seen


def left_out(seen: Sequence[Span], known: Mapping[str, list[Sizes]]) -> Iterator[Span]:
    """Stand-ins for the requests that the journals know and the timeline doesn't: at the place of their neighbour."""
    by_seat: dict[str, list[Span]] = defaultdict(list)
    for span in seen:
        by_seat[seat_of(span)].append(span)
    neighbour: Span | None = None
    waiting: list[Sizes] = []  # those before the first that was seen
    for seat, requests in sorted(known.items()):
        here = by_seat.get(seat, [])
        neighbour = here[0] if here else neighbour
        there = Counter(span.args["num_tokens"] for span in here)
        for sizes in requests:
            if there[sizes.new_tokens]:
                there[sizes.new_tokens] -= 1
            else:
                waiting.append(sizes)
        if neighbour is not None:
            yield from (beside(neighbour, sizes, seat) for sizes in waiting)
            waiting = []


def beside(neighbour: Span, sizes: Sizes, seat: str) -> Span:
    token_s = (neighbour.end_s - neighbour.start_s) / neighbour.args["num_tokens"]
    return replace(
        neighbour,
        end_s=neighbour.start_s + sizes.new_tokens * token_s,
        args={"request": f"{seat}/left out", "num_tokens": sizes.new_tokens},
    )


def seat_of(span: Span) -> str:
    """`g000012/3` of g000012/3/t0 and g000012/3/j0.0."""
    return str(span.args["request"]).rsplit("/", 1)[0]


def mean_lengths(known: Mapping[str, list[Sizes]]) -> Lengths:
    sizes = [one for requests in known.values() for one in requests]
    return Lengths(
        prompt_tokens=fmean(one.prompt_tokens for one in sizes), new_tokens=fmean(one.new_tokens for one in sizes)
    )


# -- learner -------------------------------------------------------------------------------------------------------


def learner_of(
    spans: Sequence[Span], run_dir: Path, known: Mapping[str, list[Sizes]]
) -> tuple[LearnerSpeed | None, list[str]]:
    """Seconds in its spans against tokens trained, step by step."""
    tokens = tokens_by_step(run_dir, known)
    busy, done = {}, 0.0
    for span in sorted((span for span in spans if span.lane == "learner"), key=lambda span: span.start_s):
        done += span.end_s - span.start_s
        if span.name.startswith("step "):
            busy[int(span.name.split()[1])] = done
            done = 0.0
    steps = [step for step in sorted(busy) if step in tokens][WARM_UP_STEPS:]
    fit = fit_learner([tokens[step] for step in steps], [busy[step] for step in steps])
    if fit is None:
        return None, ["learner: fewer than three steps, the first not counted"]
    return fit[0], [f"learner: {fit[1]}"] if fit[1] else []


def tokens_by_step(run_dir: Path, known: Mapping[str, list[Sizes]]) -> dict[int, int]:
    """Prompt and new tokens of the groups that each step trained."""
    of_group: Counter[str] = Counter()
    for seat, turns in known.items():
        # A later turn's prompt holds the earlier ones.
        of_group[seat.rsplit("/", 1)[0]] += turns[-1].prompt_tokens + turns[-1].new_tokens
    tokens: Counter[int] = Counter()
    for line in json_lines(run_dir / "groups.jsonl"):
        if line["outcome"] == "trained":
            tokens[line["step"]] += of_group[line["group_id"]]
    return tokens


# -- files ---------------------------------------------------------------------------------------------------------


def rollout_sizes(run_dir: Path) -> dict[str, list[Sizes]]:
    """`group/sibling` -> its turns."""
    return {
        f"{line['group_id']}/{line['sibling']}": [
            Sizes(prompt_tokens=len(turn["prompt_ids"]), new_tokens=len(turn["token_ids"])) for turn in line["turns"]
        ]
        for line in json_lines(run_dir / "rollouts.jsonl")
    }


def judgement_sizes(run_dir: Path) -> dict[str, list[Sizes]]:
    """`group/sibling` -> its judgements, failed ones as far as they hold their tokens."""
    return {
        f"{line['group_id']}/{line['sibling']}": [
            Sizes(prompt_tokens=len(one["prompt_ids"]), new_tokens=completion_tokens(one["completion"]))
            for one in [*line["judgements"], *line["failures"]]
            if "completion" in one
        ]
        for line in json_lines(run_dir / "judgements.jsonl")
        if line["judgements"]
    }


def completion_tokens(completion: Record) -> int:
    """A judge outside shows no ids, only how many they were."""
    return len(completion["token_ids"]) or completion.get("unseen_tokens", 0)


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
    """The array is one event a line: a run that was killed leaves out the end."""
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
                start_s = event["ts"] / 1e6
                yield Span(
                    lane=titles.get(row, ""),
                    name=event["name"],
                    start_s=start_s,
                    end_s=start_s + event["dur"] / 1e6,
                    args=event.get("args", {}),
                )
