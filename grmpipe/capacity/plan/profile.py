"""A profile: costs and lengths measured from an earlier run's files. Writes nothing.

Engines are fitted to the spans of their requests, the learner to its spans and the tokens of each step. Processes that
shared cores or a GPU slowed each other down, so spans are measured in work done, not in seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from grmpipe.capacity.cost import LearnerSpeed
from grmpipe.capacity.lower_bound import LEARNER, POLICY
from grmpipe.capacity.plan.fit import EngineFit, MeasuredRequest, fit_engine, fit_learner
from grmpipe.capacity.plan.profile_files import (
    Sizes,
    Span,
    judgement_sizes,
    read_spans,
    rollout_sizes,
    seconds_by_step,
    tokens_by_step,
)
from grmpipe.capacity.plan.profile_work import SYNC, WARM_UP_STEPS, DriverUse, driver_of, measured_in_work
from grmpipe.config.roles import resolve_engine
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.yaml_io import read_yaml
from models.types import EngineSpeed

MIN_CLEAR = 40  # uninterrupted requests; with fewer, the others are used too


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Means over a role's requests."""

    prompt_tokens: float
    new_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What could be measured. The rest is absent, and `notes` says why. `learner`: token_s of all passes over a packed
    token, step_s of all updates of a batch.
    """

    config: RunConfig  # of the earlier run
    engines: Mapping[str, EngineFit]
    lengths: Mapping[str, Lengths]
    learner: LearnerSpeed | None
    sync_s: float | None
    driver_request_s: float | None
    notes: tuple[str, ...]


def read_profile(path: str, cores: int, believed: Mapping[str, EngineSpeed] | None = None) -> Profile:
    """Read a profile. cores: of the machine that ran it. believed: speeds by role, a prior for what can't be separated.
    Raises ConfigError if there is no run to read.
    """
    run_dir = Path(path).parent if path.endswith(".json") else Path(path)
    for name in ("timeline.json", "config.yaml", "rollouts.jsonl"):
        if not (run_dir / name).is_file():
            raise ConfigError(f"plan.profile: {run_dir} holds no {name}; give the directory of a run, or its timeline")
    config = read_yaml(run_dir / "config.yaml")
    judging = config.judging
    known = {POLICY: rollout_sizes(run_dir)} | judgement_sizes(run_dir, judging.roles, judging.role_by_judge)
    seen = [*read_spans(run_dir / "timeline.json")]
    roles = [role for role in known if any(span.name == role for span in seen)]
    hidden = {role: [*left_out(requests_of(role, seen), known[role])] for role in roles}
    steps = seconds_by_step(run_dir)
    driver = driver_of(steps, config)
    whole = [*seen, *(span for role in roles for span in hidden[role])]
    work = measured_in_work(whole, config, cores, driver, steps)
    spans = work.spans
    notes: list[str] = []
    engines = {}
    for role in roles:
        if hidden[role]:
            asked = len(requests_of(role, seen)) + len(hidden[role])
            notes.append(f"{role}: {len(hidden[role])} of {asked} requests had no row in the timeline")
        belief = (believed or {}).get(role)
        clear = {span.args["request"] for span in undisturbed(requests_of(role, whole), whole)}
        if (fit := engine_of(role, spans, clear, known[role], config, driver, belief)) is not None:
            engines[role] = fit.held_to(work.cpu_s[role]) if role in work.cpu_s else fit
        else:
            notes.append(f"{role}: too few requests in the timeline to measure its speed")
    learner, said = learner_of(spans, run_dir, known[POLICY], config.train.prefix_sharing)
    notes += said
    pushes = [span.end_s - span.start_s for span in spans if span.lane == SYNC][WARM_UP_STEPS:]
    if not pushes:
        notes.append("sync: fewer than two pushes of weights")
    if driver is None:
        notes.append("driver: its own time can't be separated; use a run of two steps or more on cluster=ray")
    return Profile(
        config=config,
        engines=engines,
        lengths={role: mean_lengths(known[role]) for role in roles if known[role]},
        learner=learner,
        sync_s=median(pushes) if pushes else None,
        driver_request_s=driver.request_s if driver else None,
        notes=tuple(notes),
    )


# -- engines -------------------------------------------------------------------------------------------------------


def engine_of(
    role: str,
    spans: Sequence[Span],
    clear: Collection[str],
    known: Mapping[str, list[Sizes]],
    config: RunConfig,
    driver: DriverUse | None,
    believed: EngineSpeed | None,
) -> EngineFit | None:
    """A role's speed, from its requests on all of its engines. None if there are too few.

    A request is assumed to cost the engine's process about as much as the driver.
    """
    requests = requests_of(role, spans)
    usual = round(mean_lengths(known).prompt_tokens) if known else 0
    lanes: dict[str, list[MeasuredRequest]] = defaultdict(list)
    for span in requests:
        seat = seat_of(span)
        sizes = known.get(seat)
        request = MeasuredRequest(
            start_s=span.start_s,
            end_s=span.end_s,
            begun_s=span.begun_s,
            prompt_tokens=sizes[0].prompt_tokens if sizes else usual,
            new_tokens=span.args["num_tokens"],
            # Siblings share a prompt; so do the judgements of one rollout by one judge.
            shares=seat.rsplit("/", 1)[0] if role == POLICY else f"{seat}{mark_of(span)}",
            counts=span.args["request"] in clear,
        )
        lanes[span.lane].append(request)
    max_rows = resolve_engine(role, config).max_rows
    return fit_engine(list(lanes.values()), max_rows, believed, driver.request_s if driver else 0.0)


def requests_of(role: str, spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name == role and span.args.get("num_tokens", 0) > 0]


def undisturbed(requests: Sequence[Span], spans: Sequence[Span]) -> Sequence[Span]:
    """Requests of a warm engine that the timeline has and no push interrupted, if they are enough; otherwise all."""
    first_step = min((span.end_s for span in spans if span.name.startswith("step ")), default=0.0)
    pushes = [span for span in spans if span.lane == SYNC]
    clear = [
        span
        for span in requests
        if span.start_s > first_step
        and not span.args["request"].endswith(LEFT_OUT)
        and not any(push.start_s < span.end_s and span.start_s < push.end_s for push in pushes)
    ]
    return clear if len(clear) >= MIN_CLEAR else requests


LEFT_OUT = "/left out"


def left_out(seen: Sequence[Span], known: Mapping[str, list[Sizes]]) -> Iterator[Span]:
    """Substitutes for requests that the journals have and the timeline lacks, at the place of their neighbours."""
    by_seat: dict[str, list[Span]] = defaultdict(list)
    for span in seen:
        by_seat[seat_of(span)].append(span)
    neighbour: Span | None = None
    waiting: list[Sizes] = []  # those before the first recorded one
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
    began_s = neighbour.start_s if neighbour.begun_s is None else neighbour.begun_s
    token_s = (neighbour.end_s - began_s) / neighbour.args["num_tokens"]
    return replace(
        neighbour,
        end_s=began_s + sizes.new_tokens * token_s,
        args={"request": f"{seat}{LEFT_OUT}", "num_tokens": sizes.new_tokens},
    )


def seat_of(span: Span) -> str:
    """`g000012/3` of g000012/3/t0 and g000012/3/j0.0."""
    return str(span.args["request"]).rsplit("/", 1)[0]


def mark_of(span: Span) -> str:
    """`@short` of g000012/3/j0.0@short: the judge that asked; nothing for the first one."""
    _, marked, judge = str(span.args["request"]).rpartition("@")
    return f"@{judge}" if marked else ""


def mean_lengths(known: Mapping[str, list[Sizes]]) -> Lengths:
    sizes = [one for requests in known.values() for one in requests]
    return Lengths(
        prompt_tokens=fmean(one.prompt_tokens for one in sizes), new_tokens=fmean(one.new_tokens for one in sizes)
    )


# -- learner -------------------------------------------------------------------------------------------------------


def learner_of(
    spans: Sequence[Span], run_dir: Path, known: Mapping[str, list[Sizes]], prefix_sharing: bool
) -> tuple[LearnerSpeed | None, list[str]]:
    """A learner's speed: seconds of its spans against tokens trained, step by step."""
    tokens = tokens_by_step(run_dir, known, prefix_sharing)
    busy, done = {}, 0.0
    for span in sorted((span for span in spans if span.lane == LEARNER), key=lambda span: span.start_s):
        done += span.end_s - span.start_s
        if span.name.startswith("step "):
            busy[int(span.name.split()[1])] = done
            done = 0.0
    steps = [step for step in sorted(busy) if step in tokens][WARM_UP_STEPS:]
    fit = fit_learner([tokens[step] for step in steps], [busy[step] for step in steps])
    if fit is None:
        return None, ["learner: fewer than three steps, not counting the first"]
    return fit[0], [f"learner: {fit[1]}"] if fit[1] else []
