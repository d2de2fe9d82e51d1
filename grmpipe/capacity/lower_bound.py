"""A lower bound on the time of a step: the work of each slot, and the longest chain. Pure.

No overlap beats it: a slot with several roles does all their work, cores do all that runs on them, and a synchronous
step can't end before one rollout was played, judged, packed and trained.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.config.keys.entry_names import LEARNER as GRM_LEARNER
from grmpipe.models.types import EngineSpeed
from grmpipe.scheduler.placement import Placement, Seat

LEARNER = "learner"
CRITIC = "critic"
DRIVER = "driver"  # the driver process: neither a role nor a seat
POLICY = "policy"
META_RM = "meta_rm"


def is_learning(role: str) -> bool:
    """Whether a role's processes are the ranks of one model in training: all of them have the same work."""
    return role in (LEARNER, CRITIC) or role.endswith(GRM_LEARNER)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWork:
    """The work of a role's engines in a step, all together. Lengths are means. prompt_shared_by: requests with the same
    prompt, which a prefix cache computes and holds once. outside_s: of a request, while tools are called.
    """

    requests: int
    prompt_tokens: float
    new_tokens: float
    prompt_shared_by: float = 1.0
    outside_s: float = 0.0

    @property
    def prefilled_tokens(self) -> float:
        """The prompt tokens of a request that no cache holds already."""
        return self.prompt_tokens / self.prompt_shared_by


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmTraining:
    """The work of a judging model's learner in a step of the policy. `model`: the role whose weights it trains.
    `forward_tokens`: of passes without gradients.
    """

    model: str
    steps: float
    tokens: float
    forward_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of a step."""

    engines: Mapping[str, RoleWork]  # in the order of the flow: policy, then the models that judge
    learner_tokens: float
    groups: int
    max_staleness: int
    learner_forward_tokens: float = 0.0  # in passes without gradients: by a reference, for pi_old
    learner_updates: int = 1  # optimizer steps
    starts_early: bool = True  # the learner trains groups while others roll out, not the whole batch at its end
    critic_tokens: float = 0.0  # 0: no critic
    critic_updates: int = 1
    scorer_tokens: Mapping[str, float] = field(default_factory=dict)  # by role: what models with a scalar head read
    grm_learners: Mapping[str, GrmTraining] = field(default_factory=dict)  # by the learner's role

    @property
    def roles(self) -> tuple[str, ...]:
        critic = (CRITIC,) if self.critic_tokens > 0 else ()
        return (*self.engines, *self.scorer_tokens, LEARNER, *critic, *self.grm_learners)


def engine_busy_s(work: RoleWork, speed: EngineSpeed, num_engines: int, batches_in_flight: int = 1) -> float:
    """Seconds per step that each engine of a role is busy, with its rows as full as requests, rows and cache allow."""
    share = work.requests / num_engines
    rows = max(1.0, min(share * batches_in_flight, speed.max_rows, kv_rows(work, speed)))
    cached = work.prompt_tokens + work.new_tokens / 2
    token_s = speed.step_s / rows + speed.row_s + cached * speed.cached_token_s
    joining_s = speed.request_s + work.prefilled_tokens * speed.prefill_token_s
    return share * (joining_s + work.new_tokens * token_s)


def kv_rows(work: RoleWork, speed: EngineSpeed) -> float:
    """Rows whose keys and values fit at the same time, if they are half written on average."""
    return speed.kv_tokens / (work.prefilled_tokens + work.new_tokens / 2) if speed.kv_tokens else float("inf")


def busy_s(role: str, work: StepWork, costs: Costs, num_processes: int) -> float:
    """Seconds per step that each process of a role, or the driver, is busy. `costs`: those of a learner with this many
    ranks. A push of weights stops the learner and the engines that it goes to.
    """
    if role == DRIVER:
        return sum(asked.requests for asked in work.engines.values()) * costs.driver_request_s
    if role == LEARNER:
        return learner_s(work, costs.learner) + costs.sync_s
    if role == CRITIC:
        assert costs.critic is not None  # it reads each token once for its value, and once more to learn
        token_s = costs.critic.forward_s + costs.critic.token_s
        return work.critic_tokens * token_s + work.critic_updates * costs.critic.step_s
    if role in work.scorer_tokens:
        return work.scorer_tokens[role] * costs.scorer_token_s[role] / num_processes
    if (trained := work.grm_learners.get(role)) is not None:
        speed = costs.grm_learners[role]
        learning_s = trained.tokens * speed.token_s + trained.forward_tokens * speed.forward_s
        return learning_s + trained.steps * (speed.step_s + costs.grm_sync_s[role])
    own = engine_busy_s(work.engines[role], costs.engines[role], num_processes, work.max_staleness + 1)
    return own + pushes_s(role, work, costs)


def learner_s(work: StepWork, speed: LearnerSpeed) -> float:
    """Seconds of a step's passes and updates in the policy's learner, without the push."""
    return passes_s(work, speed) + work.learner_updates * speed.step_s


def passes_s(work: StepWork, speed: LearnerSpeed) -> float:
    return work.learner_tokens * speed.token_s + work.learner_forward_tokens * speed.forward_s


def pushes_s(role: str, work: StepWork, costs: Costs) -> float:
    """Seconds per step in which a role's engines stand still for pushes of weights."""
    of_grm = (
        trained.steps * costs.grm_sync_s[learner]
        for learner, trained in work.grm_learners.items()
        if trained.model == role
    )
    return (costs.sync_s if role == POLICY else 0.0) + sum(of_grm)


def busiest_slot_s(placement: Placement, loads: Mapping[str, float], cores: int = 0) -> float:
    """Seconds per step that some slot must work, however the engines of each role divide its work.

    With `cores`, processes on CPU slots run on any of them: no faster than all together, nor than each alone. Ranks of
    one model have equal work. The work of a set of roles must be done on their slots, in addition to the ranks' work
    there: the least makespan of divisible work is the largest such mean over sets of roles (max-flow, min-cut).
    loads: seconds of each process of a role if its work is divided evenly; of the driver, if it has any. A role
    without one counts for nothing.
    """
    loaded = {role: seats for role, seats in placement.seats.items() if role in loads}
    fixed: dict[tuple[str, int], float] = defaultdict(float)
    where: dict[str, set[tuple[str, int]]] = {}
    floating = {role for role, seats in loaded.items() if cores and is_on_cpu(placement, seats[0])}
    least_s = driver_s = loads.get(DRIVER, 0.0)
    if cores:
        # None is faster than its own work, nor all together than their sum.
        together_s = driver_s + sum(loads[role] * len(loaded[role]) for role in floating)
        least_s = max(together_s / cores, driver_s, *(loads[role] for role in floating))
    for role, seats in loaded.items():
        if role in floating:
            continue
        where[role] = {(seat.pool, slot) for seat in seats for slot in seat.slots}
        for place in where[role] if is_learning(role) else ():
            fixed[place] += loads[role]
    engines = [role for role in where if not is_learning(role)]
    means = []
    for size in range(1, len(engines) + 1):
        for roles in itertools.combinations(engines, size):
            places = set().union(*(where[role] for role in roles))
            work = sum(loads[role] * len(where[role]) for role in roles) + sum(fixed[place] for place in places)
            means.append(work / len(places))
    return max([*fixed.values(), *means, least_s])


def is_on_cpu(placement: Placement, seat: Seat) -> bool:
    return placement.pools[seat.pool].resource == "cpu"


def chain_s(work: StepWork, costs: Costs) -> float:
    """The time of a rollout, then of a judgement by the slowest judging model, each alone on its engine; then a group,
    the step, the push. Models that judge may all be asked at once. Without an early start the whole batch is trained
    after its last group.
    """
    alone_s = {role: mean_alone_s(asked, costs.engines[role]) for role, asked in work.engines.items()}
    judged_s = max((alone_s[role] for role in alone_s if role != POLICY), default=0.0)
    last_s = passes_s(work, costs.learner) / work.groups
    if not work.starts_early:
        last_s += work.learner_tokens * (1 - 1 / work.groups) * costs.learner.token_s
    return alone_s[POLICY] + judged_s + last_s + work.learner_updates * costs.learner.step_s + costs.sync_s


def mean_alone_s(asked: RoleWork, speed: EngineSpeed) -> float:
    """The time of a request of mean lengths, alone on its engine."""
    if not asked.requests:
        return 0.0
    cached = asked.prompt_tokens + asked.new_tokens / 2
    token_s = speed.step_s + speed.row_s + cached * speed.cached_token_s
    working_s = speed.request_s + asked.prompt_tokens * speed.prefill_token_s + asked.new_tokens * token_s
    return working_s + asked.outside_s
