"""Searches the fastest placement: candidates are pruned by memory and by the bound, then simulated and ranked. Pure.

The costs, the memory and the simulation of a candidate are given as functions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from grmpipe.capacity.cost import Costs
from grmpipe.capacity.lower_bound import StepWork, busiest_core_s, busy_s, chain_s
from scheduler.devices import GB
from scheduler.placement import PlacementConfig, PoolConfig, RoleConfig

MOST_SPLITS = 2000  # of the slots of one kind among some pools; with more of them, splits are coarser
MOST_CANDIDATES = 50_000  # of all layouts together, before the widths of engines: more roles have coarser splits
MOST_FINE_SLOTS = 48  # up to here every split is tried, if there are few pools
EVEN = 1.02  # simulated times within this factor are equal; the smaller bound then goes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """A role's processes in a pool: `replicas` of `width` slots each."""

    replicas: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePool:
    """A pool of a candidate: slots of one kind, and the roles on it. Several roles share all of its slots."""

    kind: str  # name of the configured pool whose slots these are
    slots: int
    seats: Mapping[str, Seating]
    elastic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate placement."""

    candidate_pools: tuple[CandidatePool, ...]

    @property
    def layout(self) -> tuple[tuple[tuple[str, ...], bool], ...]:
        """Which roles share pools, without numbers."""
        return tuple((tuple(one_pool.seats), one_pool.elastic) for one_pool in self.candidate_pools)

    @property
    def seats(self) -> dict[str, Seating]:
        return {role: seating for one_pool in self.candidate_pools for role, seating in one_pool.seats.items()}

    def describe(self) -> str:
        return " | ".join(describe_pool(one_pool) for one_pool in self.candidate_pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """The problem of a search.

    kinds:   configured pools that differ in the kind of slot, with the total slots of each kind.
    widths:  engine role -> slots per replica over which its model can be sharded.
    costs:   candidate -> costs of its processes.
    memory:  (role, seating, kind) -> bytes on each of its slots; None if unknown.
    elastic: roles whose engines may swap slots.
    replicas: role -> allowed numbers of its processes; any number for a role that isn't in it.
    """

    kinds: Mapping[str, PoolConfig]
    work: StepWork
    widths: Mapping[str, Sequence[int]]
    costs: Callable[[Candidate], Costs]
    memory: Callable[[str, Seating, str], float | None]
    elastic: frozenset[str] = frozenset()
    replicas: Mapping[str, range] = field(default_factory=dict)

    def allows(self, one_pool: CandidatePool) -> bool:
        return all(
            role not in self.replicas or seating.replicas in self.replicas[role]
            for role, seating in one_pool.seats.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A candidate with its bound. loads: role -> seconds per step that each of its processes is busy."""

    candidate: Candidate
    bound_s: float
    work_s: float  # of the busiest slot, or of the shared cores
    loads: Mapping[str, float]
    slots_s: tuple[float, ...]  # work of one slot per pool, the largest first

    @property
    def reason(self) -> str:
        """The reason for its time."""
        if self.bound_s > self.work_s:
            return "the chain of one rollout is longer than the work of any role"
        if self.work_s < self.slots_s[0]:
            role = max(self.loads, key=lambda role: self.loads[role])
            alone = self.loads[role] >= self.work_s
            return f"bound by {role} {self.loads[role]:.3g} s" if alone else "bound by the cores, which all roles share"
        candidate_pools = self.candidate.candidate_pools
        one_pool = max(candidate_pools, key=lambda one_pool: sum(self.loads[role] for role in one_pool.seats))
        parts = " + ".join(f"{role} {self.loads[role]:.3g} s" for role in one_pool.seats)
        return f"bound by {parts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction of a simulation for a candidate."""

    step_s: float
    busy: Mapping[str, float]  # role -> share of its slots' time


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A candidate with its prediction; None if nothing simulates, or time ran out."""

    weighed: Weighed
    predicted: Predicted | None

    @property
    def step_s(self) -> float:
        return self.predicted.step_s if self.predicted else self.weighed.bound_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The ranked candidates, the best first: simulated ones by their time, then the others by their bound."""

    ranked: tuple[Ranked, ...]
    num_candidates: int
    num_too_large: int  # too large for the memory of their slots


def search(
    question: SearchProblem,
    simulate: Callable[[Candidate], Predicted] | None,
    max_simulated: int,
    time_is_up: Callable[[], bool] = lambda: False,
) -> Ranking:
    """Search. Raises ValueError if no candidate fits the slots or their memory; it names the role that needs most."""
    candidates = list(enumerate_candidates(question))
    fitting = [candidate for candidate in candidates if fits_memory(candidate, question)]
    if not fitting:
        raise ValueError(nothing_fits(question, candidates))
    weighed = sorted((weigh(candidate, question) for candidate in fitting), key=order)
    ranked = simulated(finalists(weighed, max_simulated), simulate, time_is_up) if simulate else []
    done = {id(entry.weighed) for entry in ranked}
    rest = [Ranked(weighed=entry, predicted=None) for entry in weighed if id(entry) not in done]
    return Ranking(
        ranked=(*by_time(ranked), *rest),
        num_candidates=len(candidates),
        num_too_large=len(candidates) - len(fitting),
    )


# -- candidates ----------------------------------------------------------------------------------------------------


def enumerate_candidates(question: SearchProblem) -> Iterator[Candidate]:
    """Every way to share pools, every kind of slot for each pool, every split of the slots, every width of an
    engine.
    """
    layouts = list(partitions(question.work.roles))
    most_splits = min(MOST_SPLITS, MOST_CANDIDATES // len(layouts))
    for blocks in layouts:
        for kinds in itertools.product(question.kinds, repeat=len(blocks)):
            for slots in slot_splits(kinds, question.kinds, most_splits):
                choices = [
                    [
                        one_pool
                        for one_pool in candidate_pools_of(kind, num_slots, block, question)
                        if question.allows(one_pool)
                    ]
                    for kind, num_slots, block in zip(kinds, slots, blocks, strict=True)
                ]
                for candidate_pools in itertools.product(*choices):
                    yield Candidate(candidate_pools=candidate_pools)


def partitions(roles: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to group roles; separate ones first."""
    if not roles:
        yield ()
        return
    first, *others = roles
    for blocks in partitions(others):
        yield ((first,), *blocks)
        for index, block in enumerate(blocks):
            yield (*blocks[:index], (first, *block), *blocks[index + 1 :])


def slot_splits(kinds: Sequence[str], pools: Mapping[str, PoolConfig], most_splits: int) -> Iterator[tuple[int, ...]]:
    """Slots for each block, with all slots of a kind in use."""
    shares = []
    for kind in dict.fromkeys(kinds):
        places = [index for index, other in enumerate(kinds) if other == kind]
        ways = splits(pools[kind].slots, len(places), most_splits)
        shares.append([dict(zip(places, split, strict=True)) for split in ways])
    for chosen in itertools.product(*shares):
        merged = {index: slots for share in chosen for index, slots in share.items()}
        yield tuple(merged[index] for index in range(len(kinds)))


def splits(slots: int, parts: int, most: int = MOST_SPLITS) -> Iterator[tuple[int, ...]]:
    """Ways to split slots into parts of at least one; in larger pieces if there are many."""
    yield from splits_by(slots, parts, piece=-(-slots // fine_slots(parts, most)))


@functools.cache
def fine_slots(parts: int, most: int) -> int:
    """The slots up to which every split into this many parts is tried, if there are at most `most`: of 2000, 48 slots
    for 3 parts (1081 splits), 24 for 4 (1771), 17 for 5 (1820).
    """
    slots = parts
    while slots < MOST_FINE_SLOTS and math.comb(slots, parts - 1) <= most:
        slots += 1
    return slots


def splits_by(slots: int, parts: int, piece: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (slots,)
        return
    for first in range(piece, slots, piece):
        for others in splits_by(slots - first, parts - 1, piece):
            yield (first, *others)


def candidate_pools_of(kind: str, slots: int, roles: tuple[str, ...], question: SearchProblem) -> list[CandidatePool]:
    """Pools of these roles. A role alone takes any width that divides the slots; roles that share have one process each
    on every slot.
    """
    if len(roles) == 1:
        (role,) = roles
        widths = [n for n in question.widths.get(role, (1,)) if slots % n == 0]
        return [
            CandidatePool(kind=kind, slots=slots, seats={role: Seating(replicas=slots // n, width=n)}) for n in widths
        ]
    if any(1 not in question.widths.get(role, (1,)) for role in roles):
        return []
    shared = CandidatePool(kind=kind, slots=slots, seats={role: Seating(replicas=slots, width=1) for role in roles})
    if question.elastic and set(roles) <= question.elastic:
        return [shared, replace(shared, elastic=True)]
    return [shared]


def fits_memory(candidate: Candidate, question: SearchProblem) -> bool:
    return all(wanted <= limit for wanted, limit in memory_of(candidate, question))


def memory_of(candidate: Candidate, question: SearchProblem) -> Iterator[tuple[float, float]]:
    """What roles need together on a slot and what the slot has, for each pool with known memory."""
    for one_pool in candidate.candidate_pools:
        limit = question.kinds[one_pool.kind].memory_gb
        if limit is not None:
            held = [question.memory(role, seating, one_pool.kind) for role, seating in one_pool.seats.items()]
            yield sum(part for part in held if part is not None), limit * GB


def nothing_fits(question: SearchProblem, candidates: Sequence[Candidate]) -> str:
    """Why no candidate is left, by the one that lacks least."""
    there = ", ".join(f"{pool.slots} of {kind}" for kind, pool in question.kinds.items())
    if not candidates:
        return f"placement.pools: {', '.join(question.work.roles)} can't be placed on the available slots ({there})"
    nearest = min(candidates, key=lambda one: max(wanted / limit for wanted, limit in memory_of(one, question)))
    held = [
        (question.memory(role, seating, one_pool.kind) or 0.0, role, one_pool)
        for one_pool in nearest.candidate_pools
        for role, seating in one_pool.seats.items()
    ]
    num_bytes, role, one_pool = max(held, key=lambda entry: entry[0])
    memory_gb = question.kinds[one_pool.kind].memory_gb or 0.0
    return (
        f"placement.pools.{one_pool.kind}: no placement fits its slots ({there}): even in the best one {role} needs "
        f"{num_bytes / GB:.3g} of {memory_gb:g} GB per slot; give more or larger slots, or lower the memory of {role} "
        "(see task=plan without plan.search)"
    )


# -- bounds --------------------------------------------------------------------------------------------------------


def weigh(candidate: Candidate, question: SearchProblem) -> Weighed:
    """A candidate with its work bound; for a synchronous run also the chain."""
    costs, seats = question.costs(candidate), candidate.seats
    loads = {role: busy_s(role, question.work, costs, seats[role].replicas) for role in question.work.roles}
    slots_s = sorted(
        (sum(loads[role] for role in one_pool.seats) for one_pool in candidate.candidate_pools), reverse=True
    )
    work_s = slots_s[0]
    if costs.cores and all(question.kinds[one_pool.kind].resource == "cpu" for one_pool in candidate.candidate_pools):
        work_s = busiest_core_s([(loads[role], seats[role].replicas) for role in loads], costs.cores)
    chain = 0.0 if question.work.max_staleness else chain_s(question.work, costs)
    return Weighed(candidate=candidate, bound_s=max(work_s, chain), work_s=work_s, loads=loads, slots_s=tuple(slots_s))


def order(weighed: Weighed) -> tuple[float, ...]:
    """The key of ranking: the bound; among equals the work of the next busiest slots, which is the next risk."""
    return (weighed.bound_s, *weighed.slots_s)


def finalists(weighed: Sequence[Weighed], count: int) -> list[Weighed]:
    """The best of every layout in alternation: the bound ignores the costs of sharing, so it may be wrong between
    layouts.
    """
    taken: Counter[object] = Counter()
    turns = []
    for place, entry in enumerate(weighed):
        layout = entry.candidate.layout
        turns.append((taken[layout], place, entry))
        taken[layout] += 1
    chosen = sorted(turns, key=lambda turn: turn[:2])[:count]
    return [entry for _, _, entry in sorted(chosen, key=lambda turn: turn[1])]


def simulated(
    entries: Sequence[Weighed], simulate: Callable[[Candidate], Predicted], time_is_up: Callable[[], bool]
) -> list[Ranked]:
    """Simulate candidates in the order of their bounds, until a bound exceeds the best time."""
    ranked: list[Ranked] = []
    for entry in entries:
        best = min((done.step_s for done in ranked), default=float("inf"))
        if entry.bound_s > best or time_is_up():
            break
        ranked.append(Ranked(weighed=entry, predicted=simulate(entry.candidate)))
    return ranked


def by_time(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Sort by simulated time; those within noise of the best by their bound."""
    best = min((entry.step_s for entry in ranked), default=0.0)
    near = [entry for entry in ranked if entry.step_s <= best * EVEN]
    far = [entry for entry in ranked if entry.step_s > best * EVEN]
    return [*sorted(near, key=lambda e: order(e.weighed)), *sorted(far, key=lambda e: e.step_s)]


# -- as a placement ------------------------------------------------------------------------------------------------


def placement_of(candidate: Candidate, kinds: Mapping[str, PoolConfig]) -> PlacementConfig:
    """The `placement` block of a candidate. A pool is named by its roles."""
    pools, roles = {}, {}
    for one_pool in candidate.candidate_pools:
        name = "_and_".join(one_pool.seats)
        pools[name] = replace(kinds[one_pool.kind], slots=one_pool.slots, elastic=one_pool.elastic)
        for role, seating in one_pool.seats.items():
            roles[role] = RoleConfig(pool=name, replicas=seating.replicas, slots_per_replica=seating.width)
    return PlacementConfig(pools=pools, roles=roles)


def describe_pool(one_pool: CandidatePool) -> str:
    """A pool in words, such as `learner 4 | policy 2x2 | grm 1`, or `policy+grm 8 elastic`."""
    if len(one_pool.seats) > 1:
        return f"{'+'.join(one_pool.seats)} {one_pool.slots}{' elastic' if one_pool.elastic else ''}"
    ((role, seating),) = one_pool.seats.items()
    return f"{role} {seating.replicas}{f' x {seating.width} slots' if seating.width > 1 else ''}"
