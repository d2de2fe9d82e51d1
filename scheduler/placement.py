"""Places roles on slots, and checks that the machines have them. Pure: starts nothing, asks no machine."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from grmpipe.models.bounds import Bounded, above, at_least, one_of

RESOURCES = {"cpu": "cores", "gpu": "GPUs"}
SLOTS_LISTED = 4  # in a row with the same roles: a longer one has one line of a table
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class PoolConfig(Bounded):
    """A pool: slots that share a purpose. A slot is one core or one GPU."""

    slots: int = at_least(1, 1)  # [slots] Number of cores or GPUs.
    resource: str = one_of(RESOURCES, "cpu", "resource")  # What a slot is.
    # How slots are spread over machines: a strategy of Ray's placement groups.
    strategy: str = one_of(STRATEGIES, "PACK", "strategy")
    # Memory of a slot; a run whose parts can't fit is refused, task=plan warns if they may not fit; null: the device's.
    memory_gb: float | None = above(0, None, "above 0, or null if unknown")
    elastic: bool = False  # Each slot has an engine of every served role, and serves the one with the most backlog.
    time_shared: bool = False  # A learner and the engines use the slots in alternation; engines sleep while it trains.
    # Kind of GPU of a slot, for task=plan and task=simulate: h100, a100_80, ..., or a name in plan.devices; null: that
    # of this machine; auto: the same, or h100 if it has none.
    device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elastic and self.time_shared:
            raise ValueError(
                "time_shared: slots of an elastic pool move while the learner works, so it can't alternate with "
                "them; set elastic=false, or time_shared=false"
            )


@dataclass(frozen=True)
class RoleConfig(Bounded):
    """The place of a role. A replica is one process."""

    pool: str  # Pool with the slots of the role.
    replicas: int = at_least(1, 1)  # [processes] Engines of the role, or ranks of a learner.
    # [slots] Slots of each process; on GPUs an engine is then tensor-parallel.
    slots_per_replica: int = at_least(1, 1)


@dataclass(frozen=True)
class PlacementConfig:
    """The placement of processes: pools of slots, and roles on them. Roles in one pool share its slots."""

    pools: dict[str, PoolConfig] = field(default_factory=dict)
    roles: dict[str, RoleConfig] = field(default_factory=dict)

    def on_gpu(self, role: str) -> bool:
        """Whether the role's place has GPUs. A role without a place counts as on cores."""
        where = self.roles.get(role)
        pool = self.pools.get(where.pool) if where is not None else None
        return pool is not None and pool.resource == "gpu"

    def without_time_sharing(self) -> Self:
        """The same placement, in which no learner alternates with engines."""
        return replace(self, pools={name: replace(pool, time_shared=False) for name, pool in self.pools.items()})


LEAST_CALL_TIMEOUT_S = 60.0  # an engine without news reports every COLLECT_S (engine_host.py)


@dataclass(frozen=True)
class ClusterConfig(Bounded):
    """The cluster that processes run on."""

    # Where processes run: as actors of Ray (ray), or all in the driver's process, for a debugger (inprocess).
    kind: str = one_of(("ray", "inprocess"), "ray", "cluster")
    address: str | None = None  # Address of a Ray cluster to join; null: Ray is started on this machine.
    # Limit for reserving slots and starting processes, without their models.
    start_timeout_s: float = above(0, 60.0)
    # Limit of a call to a process; 6 times that for calls that compute, 12 times for calls that load or save.
    call_timeout_s: float = at_least(LEAST_CALL_TIMEOUT_S, 300.0)
    object_store_mb: int = 256  # Size of the object store of a Ray that is started here.
    # Python packages and modules sent to the workers of a joined cluster, besides grmpipe's own.
    packages: list[str] = field(default_factory=list)
    # Names of the driver's environment variables that the processes of a joined cluster also get, such as HF_HOME, or
    # NCCL_* for all with that prefix. Their values are in no file of the run.
    env_vars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.env_vars:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
                raise ValueError(
                    "env_vars: expected only names, such as HF_HOME or NCCL_*: the values are those of this process, "
                    f"so that no secret is in config.yaml; got {name.partition('=')[0]!r}"
                )
        if self.object_store_mb < 80:
            raise ValueError(f"object_store_mb: Ray needs at least 80, got {self.object_store_mb}")

    @property
    def is_joined(self) -> bool:
        """Whether it ran before: its machines are other ones, known only after joining."""
        return self.address is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one process of a role. `share`: its fraction of each of its slots."""

    role: str
    rank: int
    pool: str
    slots: tuple[int, ...]
    share: float

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"

    @property
    def is_spread(self) -> bool:
        """Whether it has a share of each of several slots."""
        return len(self.slots) > 1 and self.share < 1

    @property
    def each_slot(self) -> list[tuple[int, ...]]:
        return [(slot,) for slot in self.slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Every process with its seat. Pools without a seat are left out."""

    pools: Mapping[str, PoolConfig]
    seats: Mapping[str, tuple[Seat, ...]]  # role -> its seats by rank
    served: tuple[str, ...] = ()  # roles that engines serve: slots of an elastic pool move between them

    def find_device_kind(self, role: str) -> str:
        """cuda or cpu."""
        return "cuda" if self.pools[self.seats[role][0].pool].resource == "gpu" else "cpu"

    def gpus_per_process(self, role: str) -> int:
        """GPUs over which one model is sharded. On a CPU a process of several cores has threads instead, and this is
        1.
        """
        return len(self.seats[role][0].slots) if self.find_device_kind(role) == "cuda" else 1

    def is_elastic(self, role: str) -> bool:
        """Whether the role's slots are elastic."""
        return bool(self.elastic_slots(self.seats[role][0].pool))

    def elastic_slots(self, pool: str) -> dict[str, dict[str, str]]:
        """Slot -> role -> its engine there, for an elastic pool; empty for any other pool, or with a single role."""
        roles = self._served_in(pool)
        if not self.pools[pool].elastic or len(roles) < 2:
            return {}
        seats = {role: {seat.slots[0]: seat.name for seat in self.seats[role]} for role in roles}
        return {str(slot): {role: seats[role][slot] for role in roles} for slot in range(self.pools[pool].slots)}

    @property
    def time_sharing_roles(self) -> tuple[str, ...]:
        """Roles whose engines sleep while the learner of their pool updates: that pool is time-shared."""
        return tuple(role for role in self.served if self.is_time_shared(role))

    def is_time_shared(self, role: str) -> bool:
        """Whether the role alternates with others on its slots."""
        return self.pools[self.seats[role][0].pool].time_shared

    def _served_in(self, pool: str) -> tuple[str, ...]:
        return tuple(role for role in self.served if self.seats[role][0].pool == pool)

    def bundles(self, pool: str) -> tuple[tuple[int, ...], ...]:
        """The slots of a pool in the pieces that are reserved as one. GPUs of an engine that shares them are reserved
        one by one: Ray gives shares of a single GPU only.
        """
        seats = [seat for seats in self.seats.values() for seat in seats if seat.pool == pool]
        blocks = {piece for seat in seats for piece in (seat.each_slot if seat.is_spread else [seat.slots])}
        seated = {slot for block in blocks for slot in block}
        blocks |= {(slot,) for slot in range(self.pools[pool].slots) if slot not in seated}
        return tuple(sorted(blocks))


def bundles_by_node(sizes: Sequence[int], nodes: Sequence[str]) -> list[int]:
    """Bundle of a pool -> number of the reserved bundle that serves as it, so that equally large ones which follow each
    other are on one node as far as possible: Ray permutes them (PACK does from 17 on), and ranks that follow each other
    share samples or experts.

    sizes: slots of each bundle, as it was asked for. nodes: where it was reserved.
    """
    first = {node: nodes.index(node) for node in nodes}
    serves: dict[int, int] = {}
    for size in set(sizes):
        alike = [bundle for bundle, own in enumerate(sizes) if own == size]
        serves |= zip(alike, sorted(alike, key=lambda bundle: first[nodes[bundle]]), strict=True)
    return [serves[bundle] for bundle in range(len(sizes))]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """The resources of one machine. `address`: by which Ray knows it."""

    name: str
    cpus: int
    gpus: int
    address: str = ""

    def units(self, resource: str) -> int:
        return self.cpus if resource == "cpu" else self.gpus


def place(
    config: PlacementConfig,
    required_roles: Sequence[str],
    served: Sequence[str] = (),
    learners: Mapping[str, str] | None = None,
) -> Placement:
    """Seat every required role; roles that the run doesn't need stay out. Replicas go to the emptiest slots first.

    served:   roles that engines serve. Only these move between slots of an elastic pool, or take turns with a learner.
    learners: served roles whose weights learn, and who trains each.

    Raises ValueError that names the key: a role without a place, an unknown pool, too few slots.
    """
    blocks: dict[str, list[tuple[int, ...]]] = {}
    for role in required_roles:
        blocks[role] = _blocks(config, role, blocks, is_served=role in served)
    occupants = _occupants(config, blocks)
    _refuse_shared_blocks(config, blocks, occupants, served)
    seats = {
        role: tuple(
            Seat(
                role=role,
                rank=rank,
                pool=config.roles[role].pool,
                slots=block,
                share=1 / max(len(occupants[config.roles[role].pool, slot]) for slot in block),
            )
            for rank, block in enumerate(blocks[role])
        )
        for role in required_roles
    }
    used = {config.roles[role].pool for role in required_roles}
    placement = Placement(
        pools={name: pool for name, pool in config.pools.items() if name in used},
        seats=seats,
        served=tuple(role for role in served if role in seats),
    )
    _refuse_lone_time_sharing(placement, learners or {})
    return placement


def check_capacity(placement: Placement, nodes: Sequence[NodeCapacity]) -> None:
    """Check that the nodes can hold all pools at once. Strict pools first, then first fit: an unusual mix may need
    `strategy`.

    Raises ValueError that names the pool, the resource, what each node has and what to type.
    """
    # By number: several nodes of a cluster may have one machine's name.
    left = {resource: {number: node.units(resource) for number, node in enumerate(nodes)} for resource in RESOURCES}
    held: dict[str, str] = {}  # pool -> resource, of pools that fit
    for name in sorted(placement.pools, key=lambda pool: not placement.pools[pool].strategy.startswith("STRICT")):
        pool = placement.pools[name]
        # The largest piece first: the small ones find room in what it leaves.
        pieces = sorted((len(bundle) for bundle in placement.bundles(name)), reverse=True)
        if not _take(left[pool.resource], pieces, pool.strategy):
            raise ValueError(_shortage(placement, name, nodes, [p for p, r in held.items() if r == pool.resource]))
        held[name] = pool.resource


def describe(placement: Placement) -> str:
    """A table: slot -> the processes on it, each with its share. A row of slots with the same roles has one line."""
    rows = [("slot", "resource", "processes")]
    for name, pool in placement.pools.items():
        on_slot = [
            [s for seats in placement.seats.values() for s in seats if s.pool == name and slot in s.slots]
            for slot in range(pool.slots)
        ]
        for first, last in _alike(on_slot):
            where = f"{name} {first}" if first == last else f"{name} {first}..{last}"
            ends = zip(on_slot[first], on_slot[last], strict=True)
            rows.append((where, pool.resource, ", ".join(_name_seats(*both) for both in ends) or "(empty)"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{slot:<{widths[0]}}  {what:<{widths[1]}}  {who}" for slot, what, who in rows)


def _alike(on_slot: Sequence[Sequence[Seat]]) -> Iterator[tuple[int, int]]:
    """First and last slot of each row that a table may show in one line; of a short row each slot."""
    kinds = [[(seat.role, seat.share, len(seat.slots)) for seat in here] for here in on_slot]
    for _, row in itertools.groupby(range(len(on_slot)), key=kinds.__getitem__):
        slots = list(row)
        yield from [(slots[0], slots[-1])] if len(slots) > SLOTS_LISTED else [(slot, slot) for slot in slots]


def _name_seats(first: Seat, last: Seat) -> str:
    """A seat's name and share, or those of a row of seats of one role."""
    name = first.name if first.rank == last.rank else f"{first.name}..{last.rank}"
    return name if first.share == 1 else f"{name} ({first.share:.0%})"


def _blocks(
    config: PlacementConfig, role: str, placed: Mapping[str, list[tuple[int, ...]]], is_served: bool
) -> list[tuple[int, ...]]:
    """The slots of each replica of a role, the emptiest first."""
    where = config.roles.get(role)
    if where is None:
        raise ValueError(f"placement.roles.{role}: has no pool; {_add_role(config, role)}")
    pool = config.pools.get(where.pool)
    if pool is None:
        raise ValueError(
            f"placement.roles.{role}.pool: unknown pool {where.pool!r}; "
            f"set placement.roles.{role}.pool={_or(config.pools)}, or add placement.pools.{where.pool}"
        )
    if pool.elastic and is_served:
        return _everywhere(pool, where, role)
    wanted, width = where.replicas * where.slots_per_replica, where.slots_per_replica
    if wanted > pool.slots:
        raise ValueError(
            f"placement.roles.{role}: {where.replicas} replicas of {width} slots need {wanted} slots, "
            f"but pool {where.pool} has {pool.slots}; set placement.pools.{where.pool}.slots={wanted}"
        )
    occupants = _occupants(config, placed)
    # Blocks begin at multiples of their width, so those of one role never overlap.
    free = [tuple(range(start, start + width)) for start in range(0, pool.slots - width + 1, width)]
    free.sort(key=lambda block: sum(len(occupants.get((where.pool, slot), ())) for slot in block))
    return sorted(free[: where.replicas])


def _everywhere(pool: PoolConfig, where: RoleConfig, role: str) -> list[tuple[int, ...]]:
    """An engine on each slot of an elastic pool."""
    if where.slots_per_replica > 1:
        raise ValueError(
            f"placement.roles.{role}.slots_per_replica: slots of the elastic pool {where.pool} change their role one "
            f"by one; set placement.roles.{role}.slots_per_replica=1, or placement.pools.{where.pool}.elastic=false"
        )
    if where.replicas not in (1, pool.slots):
        raise ValueError(
            f"placement.roles.{role}.replicas: the elastic pool {where.pool} has an engine of {role} on each of its "
            f"{pool.slots} slots; leave replicas out, or set placement.pools.{where.pool}.elastic=false"
        )
    return [(slot,) for slot in range(pool.slots)]


def _occupants(
    config: PlacementConfig, placed: Mapping[str, Iterable[tuple[int, ...]]]
) -> dict[tuple[str, int], list[str]]:
    """(pool, slot) -> the roles on it."""
    occupants: dict[tuple[str, int], list[str]] = {}
    for role, blocks in placed.items():
        for slot in (slot for block in blocks for slot in block):
            occupants.setdefault((config.roles[role].pool, slot), []).append(role)
    return occupants


def _refuse_shared_blocks(
    config: PlacementConfig,
    blocks: Mapping[str, list[tuple[int, ...]]],
    occupants: Mapping[tuple[str, int], list[str]],
    served: Sequence[str],
) -> None:
    """Only an engine can share several slots, and only GPUs: Ray gives no fractions of several, and no process of ours
    but an engine's is told its devices.
    """
    for role, where in config.roles.items():
        if role in served and where.pool in config.pools and config.pools[where.pool].resource == "gpu":
            continue
        for slot in (slot for block in blocks.get(role, ()) for slot in block if len(block) > 1):
            others = [other for other in occupants[where.pool, slot] if other != role]
            if others:
                raise ValueError(
                    f"placement.roles.{role}.slots_per_replica: a replica of several slots can't share them "
                    f"(with {others[0]}); give {role} a separate pool, or set slots_per_replica=1"
                )


def _refuse_lone_time_sharing(placement: Placement, learners: Mapping[str, str]) -> None:
    """Turns are between engines and the learner that trains one of them; who else sat there would have no turn."""
    for name in (name for name, pool in placement.pools.items() if pool.time_shared):
        here = [role for role, seats in placement.seats.items() if seats[0].pool == name]
        trained = [role for role in here if role in placement.served and learners.get(role) in here]
        apart = f"placement.pools.{name}.time_shared=false"
        if not trained:
            pair = next(iter(learners.items()), ())
            both = [f"placement.roles.{role}.pool={name}" for role in reversed(pair)]
            raise ValueError(
                f"placement.pools.{name}.time_shared: a learner and engines that it trains must alternate, but only "
                f"{', '.join(here)} uses it; set {' and '.join(both)}{', or ' if both else ''}{apart}"
            )
        learner = learners[trained[0]]
        strangers = [role for role in here if role not in (learner, *placement.served)]
        if strangers:
            raise ValueError(
                f"placement.roles.{strangers[0]}.pool: only {learner} and engines can alternate on the time-shared "
                f"pool {name}; set placement.roles.{strangers[0]}.pool to another one, or {apart}"
            )
        for role in here:
            if (other := learners.get(role, learner)) != learner and other in placement.seats:
                raise ValueError(
                    f"placement.roles.{role}.pool: {role} gets its weights from {other} at any time, also when engines "
                    f"of the time-shared pool {name} may sleep; set placement.roles.{role}.pool to another one, or "
                    f"{apart}"
                )


def _take(left: dict[int, int], pieces: Sequence[int], strategy: str) -> bool:
    """Subtract the pieces from what the nodes have left. False if they don't fit."""
    if strategy == "STRICT_PACK":
        pieces = [sum(pieces)]
    used: set[int] = set()
    for piece in pieces:
        fit = [node for node, units in left.items() if units >= piece]
        if strategy == "STRICT_SPREAD":
            fit = [node for node in fit if node not in used]
        elif strategy == "SPREAD":
            fit.sort(key=lambda node: node in used)
        if not fit:
            return False
        left[fit[0]] -= piece
        used.add(fit[0])
    return True


def _shortage(placement: Placement, name: str, nodes: Sequence[NodeCapacity], held: Sequence[str]) -> str:
    pool = placement.pools[name]
    unit = RESOURCES[pool.resource]
    total = sum(node.units(pool.resource) for node in nodes)
    taken = sum(placement.pools[other].slots for other in held)
    there = "; ".join(f"{node.name} has {node.units(pool.resource) or 'no'} {unit}" for node in nodes)
    lodgers = [role for role, seats in placement.seats.items() if seats[0].pool == name]
    wants = (
        f"placement.pools.{name}: needs {pool.slots} {pool.resource} slots ({pool.strategy}) for {', '.join(lodgers)}; "
        f"{there}"
    )
    if taken:
        wants += f", {taken} of them used by {', '.join(held)}"
    if pool.resource == "gpu" and total == 0:
        return f"{wants}; set placement.pools.{name}.resource=cpu, or placement=laptop"
    if total - taken >= pool.slots:
        return (
            f"{wants}, but no arrangement of them fits; set placement.pools.{name}.strategy=PACK, or fewer "
            "slots_per_replica"
        )
    if total > taken:
        return f"{wants}; set placement.pools.{name}.slots={total - taken}"
    return f"{wants}; set {' '.join(f'placement.roles.{role}.pool={held[0]}' for role in lodgers)}"


def _add_role(config: PlacementConfig, role: str) -> str:
    """What to type: a value for a new member needs the section around it."""
    if not config.pools:
        return "define pools, as placement=laptop does"
    first, *others = config.pools
    instead = f" (or {_or(others)})" if others else ""
    return f"type '+placement.roles={{{role}: {{pool: {first}}}}}'{instead}, or add it to the file of this placement"


def _or(names: Iterable[str]) -> str:
    return " or ".join(names) or "<a pool>"
