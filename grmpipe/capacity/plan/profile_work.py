"""Converts spans of a run from seconds to work done, by how its processes shared cores and GPUs. Fits nothing.

Processes that share a core or a GPU slow down. How much isn't recorded: it is estimated from which others were busy.
For processes on cores, the run's CPU seconds correct the estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from grmpipe.capacity.lower_bound import LEARNER, POLICY, is_learning
from grmpipe.capacity.plan.profile_files import Span, StepSeconds
from grmpipe.capacity.shared_cores import Interval, Shared, WorkClock, shared_by, union, work_clock
from grmpipe.config.run_config import RunConfig
from scheduler.placement import Placement, place

SYNC = "weight sync"
WARM_UP_STEPS = 1  # allocations and compilations of a first step are no costs of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverUse:
    """The driver's use of cores. core_share: share of one core that it took."""

    request_s: float
    core_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a run. spans: in seconds of work that their process would have done in that time without sharing.
    cpu_s: role -> CPU seconds of its processes during their spans, if counted, without context switches.
    """

    spans: Sequence[Span]
    cpu_s: Mapping[str, float]


def driver_of(steps: Sequence[StepSeconds], config: RunConfig) -> DriverUse | None:
    """The driver's use of cores. None if engines and learner ran in its process, or the run has too few steps."""
    counted = steps[WARM_UP_STEPS:]
    cpu_s, seconds = sum(step.cpu_s["driver"] for step in counted), sum(step.step_s for step in counted)
    requests = sum(step.requests for step in counted)
    if config.cluster.kind == "inprocess" or not requests or not seconds:
        return None
    return DriverUse(request_s=cpu_s / requests, core_share=min(1.0, cpu_s / seconds))


def measured_in_work(
    spans: Sequence[Span], config: RunConfig, cores: int, driver: DriverUse | None, steps: Sequence[StepSeconds]
) -> Work:
    placement = place(config.placement, config.roles, config.served, config.learners)
    busy = busy_intervals(spans)
    clocks: dict[str, WorkClock] = {}
    cpu_s: dict[str, float] = {}
    for shared in shared_by(placement, cores):
        lanes = {lane_of(seat.role, seat.name) for seat in shared.seats}
        of_lanes = [busy.get(lane, []) for lane in sorted(lanes)]
        background = driver.core_share if driver and shared.is_host else 0.0
        work = work_clock(of_lanes, shared.capacity, background, shared.context_switch_cost)
        clocks |= dict.fromkeys(lanes, work)
        if not shared.is_host:
            continue
        had = work_clock(of_lanes, shared.capacity, background)
        for role, pace in paces(shared, busy, had, placement, config, windows(spans, steps)).items():
            of_role = {lane_of(seat.role, seat.name) for seat in shared.seats if seat.role == role}
            cpu_s[role] = pace * sum(seconds_of(busy[lane], work) for lane in of_role)
            if is_learning(role):  # their spans include the calls; engines are fitted from inside
                clocks[role] = work.slowed(pace)
    if LEARNER in clocks:
        clocks[SYNC] = clocks[LEARNER]
    measured = [by_clock(span, clocks[span.lane]) if span.lane in clocks else span for span in spans]
    return Work(spans=measured, cpu_s=cpu_s)


def lane_of(role: str, seat: str) -> str:
    return role if is_learning(role) else seat


def windows(spans: Sequence[Span], steps: Sequence[StepSeconds]) -> list[tuple[Interval, StepSeconds]]:
    """The interval of each step on the timeline; the time between steps belongs to none. A step ends with its push."""
    ends = {span.name.rsplit(" ", 1)[-1]: span.end_s for span in spans if span.lane == SYNC}
    counted = [step for step in steps[WARM_UP_STEPS:] if str(step.step) in ends]
    return [((ends[str(step.step)] - step.step_s, ends[str(step.step)]), step) for step in counted]


def paces(
    shared: Shared,
    busy: Mapping[str, Sequence[Interval]],
    had: WorkClock,
    placement: Placement,
    config: RunConfig,
    steps: Sequence[tuple[Interval, StepSeconds]],
) -> dict[str, float]:
    """Role -> CPU seconds of its processes over those they could have had during their spans. Only for processes that
    work themselves: neither those on GPUs nor those that leave the work to another process.
    """
    found = {}
    for role in {seat.role for seat in shared.seats}:
        itself = role not in config.served or config.engine_kind_of(role).in_process
        counted = [(window, step.cpu_s[role]) for window, step in steps if role in step.cpu_s]
        lanes = {lane_of(role, seat.name) for seat in placement.seats[role]}
        seconds = sum(seconds_of(within(busy.get(lane, []), window), had) for lane in lanes for window, _ in counted)
        if itself and seconds and (cpu_s := sum(taken for _, taken in counted)):
            found[role] = cpu_s / seconds
    return found


def seconds_of(intervals: Sequence[Interval], clock: WorkClock) -> float:
    return sum(clock.at(end_s) - clock.at(start_s) for start_s, end_s in union(intervals))


def within(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    first_s, last_s = window
    inside = [(max(start_s, first_s), min(end_s, last_s)) for start_s, end_s in intervals]
    return [(start_s, end_s) for start_s, end_s in inside if start_s < end_s]


def busy_intervals(spans: Sequence[Span]) -> dict[str, list[Interval]]:
    """Lane -> busy intervals. A push is the learner's work; the policy's engines stand still in it."""
    busy: dict[str, list[Interval]] = defaultdict(list)
    pauses = sorted((span.start_s, span.end_s) for span in spans if span.lane == SYNC)
    for span in spans:
        if span.lane == SYNC:
            busy[LEARNER].append((span.start_s, span.end_s))
        elif span.name == POLICY:
            busy[span.lane] += without(pauses, span.start_s, span.end_s)
        else:
            busy[span.lane].append((span.start_s, span.end_s))
    return busy


def without(pauses: Sequence[Interval], start_s: float, end_s: float) -> Iterator[Interval]:
    """The rest of a span without the pauses."""
    for pause_start_s, pause_end_s in pauses:
        if start_s < pause_end_s and pause_start_s < end_s:
            if start_s < pause_start_s:
                yield start_s, pause_start_s
            start_s = pause_end_s
    if start_s < end_s:
        yield start_s, end_s


def by_clock(span: Span, clock: WorkClock) -> Span:
    begun_s = None if span.begun_s is None else clock.at(span.begun_s)
    return replace(span, start_s=clock.at(span.start_s), end_s=clock.at(span.end_s), begun_s=begun_s)
