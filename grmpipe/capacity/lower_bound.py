"""The least that a step can take: the work of each slot, and the longest chain. Pure.

No overlap beats it: a slot that serves several roles does all their work, cores do all that runs on them, and a
synchronous step can't end before one rollout was played, judged, packed and stepped on.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from grmpipe.capacity.cost import Costs
from models.types import EngineSpeed
from scheduler.placement import Placement, Seat

LEARNER = "learner"
CRITIC = "critic"
LEARNING = (LEARNER, CRITIC)  # roles whose processes are the ranks of one model: they work alike
VALUED = 4 / 3  # of forward and backward: a critic reads each token once more, for its value
DRIVER = "driver"  # the pipeline's own process: no role, and no seat
POLICY = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWork:
    """What a step asks of a role's engines together. Lengths are means."""

    requests: int
    prompt_tokens: float
    new_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step asks of everybody."""

    engines: Mapping[str, RoleWork]  # in the order of the flow: policy, then who judges
    learner_tokens: float
    groups: int
    max_staleness: int
    critic_tokens: float = 0.0  # 0: there is no critic

    @property
    def roles(self) -> tuple[str, ...]:
        return (*self.engines, *(LEARNING if self.critic_tokens > 0 else (LEARNER,)))


def engine_busy_s(work: RoleWork, speed: EngineSpeed, num_engines: int, batches_in_flight: int = 1) -> float:
    """Seconds a step that each engine of a role is busy, its rows as full as requests, rows and cache allow."""
    share = work.requests / num_engines
    rows = max(1.0, min(share * batches_in_flight, speed.max_rows, kv_rows(work, speed)))
    cached = work.prompt_tokens + work.new_tokens / 2
    token_s = speed.step_s / rows + speed.row_s + cached * speed.cached_token_s
    joining_s = speed.request_s + work.prompt_tokens * speed.prefill_token_s
    return share * (joining_s + work.new_tokens * token_s)


def kv_rows(work: RoleWork, speed: EngineSpeed) -> float:
    """Rows whose keys and values fit at once."""
    return speed.kv_tokens / (work.prompt_tokens + work.new_tokens) if speed.kv_tokens else float("inf")


def busy_s(role: str, work: StepWork, costs: Costs, num_processes: int) -> float:
    """Seconds a step that each process of a role is busy, or the driver. `costs` are those of a learner of that many
    ranks. A push of weights stops learner and policy."""
    if role == DRIVER:
        return sum(asked.requests for asked in work.engines.values()) * costs.driver_request_s
    if role == LEARNER:
        return work.learner_tokens * costs.learner.token_s + costs.learner.step_s + costs.sync_s
    if role == CRITIC:
        assert costs.critic is not None
        return work.critic_tokens * VALUED * costs.critic.token_s + costs.critic.step_s
    own = engine_busy_s(work.engines[role], costs.engines[role], num_processes, work.max_staleness + 1)
    return own + (costs.sync_s if role == POLICY else 0.0)


def busiest_slot_s(placement: Placement, loads: Mapping[str, float], cores: int = 0) -> float:
    """Seconds a step that some slot has to work, however the engines of each role divide its work among them.

    With `cores`, processes on CPU slots run on any of these: no faster than all together, nor than each by itself.
    Ranks of one model work alike. The work of any roles must go where they sit, on top of these ranks' there: the least
    makespan of work that may be split is the largest such mean over sets of roles (max-flow, min-cut).
    loads: of each process of a role, were its work divided evenly; of the driver, where it has any.
    """
    fixed: dict[tuple[str, int], float] = defaultdict(float)
    where: dict[str, set[tuple[str, int]]] = {}
    floating = {role for role, seats in placement.seats.items() if cores and is_on_cpu(placement, seats[0])}
    least_s = driver_s = loads.get(DRIVER, 0.0)
    if cores:
        on_cores = [(loads[role], len(placement.seats[role])) for role in floating]
        least_s = busiest_core_s([(driver_s, 1), *on_cores], cores)
    for role, seats in placement.seats.items():
        if role in floating:
            continue
        where[role] = {(seat.pool, slot) for seat in seats for slot in seat.slots}
        for place in where[role] if role in LEARNING else ():
            fixed[place] += loads[role]
    engines = [role for role in where if role not in LEARNING]
    means = []
    for size in range(1, len(engines) + 1):
        for roles in itertools.combinations(engines, size):
            places = set().union(*(where[role] for role in roles))
            work = sum(loads[role] * len(where[role]) for role in roles) + sum(fixed[place] for place in places)
            means.append(work / len(places))
    return max([*fixed.values(), *means, least_s])


def busiest_core_s(loads: Collection[tuple[float, int]], cores: int) -> float:
    """Of processes that share cores: none is faster than its own work, nor all than theirs together.

    loads: seconds of each process of a role, and how many they are."""
    return max(sum(load * count for load, count in loads) / cores, *(load for load, _ in loads))


def is_on_cpu(placement: Placement, seat: Seat) -> bool:
    return placement.pools[seat.pool].resource == "cpu"


def chain_s(work: StepWork, costs: Costs) -> float:
    """One request after the other through every role, each alone on its engine; then a group, the step, the push."""
    played = 0.0
    for role, asked in work.engines.items():
        speed, cached = costs.engines[role], asked.prompt_tokens + asked.new_tokens / 2
        token_s = speed.step_s + speed.row_s + cached * speed.cached_token_s
        played += speed.request_s + asked.prompt_tokens * speed.prefill_token_s + asked.new_tokens * token_s
    last_group_s = work.learner_tokens / work.groups * costs.learner.token_s
    return played + last_group_s + costs.learner.step_s + costs.sync_s
