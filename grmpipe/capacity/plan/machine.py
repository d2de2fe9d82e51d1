"""The memory of this machine against that of all processes of a planned run on its cores, and what to type if it isn't
enough.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grmpipe.capacity.lower_bound import CRITIC, is_learning
from grmpipe.capacity.plan.memory import (
    CERTAIN,
    MemoryUse,
    everybody,
    list_memory,
    remedy,
    size,
    sum_held_memory,
    total,
)
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.roles.machines import check_machine
from grmpipe.scheduler.devices import GB
from grmpipe.scheduler.host_memory import read_memory_bytes

# Measured: benchmarks/process_memory.md.
DRIVER_BYTES = 0.4 * GB
RAY_BYTES = 0.5 * GB  # its servers, and the process that others are forked from
CORES = "driver and Ray"
LAST_PUSHES = "copies of the last push"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Bytes of this machine, and of a run's processes on it.

    certain: in weights, gradients and moments, and in copies of the last push. uses: what one process of each role on
    cores takes. by_role: sums over all processes of each role, though some may alternate; the driver and Ray have an
    entry, and those copies.
    """

    limit: float
    held: float
    certain: float
    uses: Mapping[str, list[MemoryUse]]
    by_role: Mapping[str, float]
    last_pushes: float = 0.0

    @property
    def sums(self) -> str:
        return ", ".join(f"{role} {size(held)}" for role, held in self.by_role.items() if held)


def measure_machine(facts: RunFacts, uses: Mapping[str, list[MemoryUse]]) -> MachineMemory | None:
    """The memory of the processes on cores, and of what others keep on the host. None if there are none, or if they run
    elsewhere: on a joined cluster, or on a machine that has what this one lacks.
    """
    config, placement = facts.config, facts.placement
    on_cores = {role: held for role, held in uses.items() if facts.pool(role).resource == "cpu"}
    last_pushes = sum(list_last_pushes(facts).values())
    if config.cluster.is_joined or not (on_cores or last_pushes) or not has_slots(facts):
        return None
    ray = 0.0 if config.cluster.kind == "inprocess" else RAY_BYTES + (config.cluster.object_store_mb << 20)
    by_role = {role: total(held) * len(placement.seats[role]) for role, held in on_cores.items()}
    return MachineMemory(
        limit=read_memory_bytes(),
        held=_hold_at_once(facts, on_cores) + last_pushes + DRIVER_BYTES + ray,
        certain=_hold_at_once(facts, {role: list_certain(held) for role, held in on_cores.items()}) + last_pushes,
        uses=on_cores,
        by_role={**by_role, LAST_PUSHES: last_pushes, CORES if ray else "driver": DRIVER_BYTES + ray},
        last_pushes=last_pushes,
    )


def list_last_pushes(facts: RunFacts) -> dict[str, float]:
    """Bytes of the copies of the last push (sync.delta) in host memory, on all machines together, by the role whose
    processes hold them: the first rank of a learner, and each engine.
    """
    copies: dict[str, float] = {}
    for role in facts.roles.seated if facts.config.sync.delta else ():
        footprint = facts.models[role.name].footprint if role.learner is not None else None
        if footprint is not None and role.learner is not None:
            one = footprint.weight_bytes(role.dtype)
            copies |= {role.learner: one, role.name: one * facts.describe_seats(role.name).replicas}
    return copies


def describe_run_memory(config: RunConfig) -> str:
    """The memory of a configured run against that of this machine, for task=doctor."""
    try:
        facts = collect_facts(config)
        machine = measure_machine(facts, {role: list_memory(facts, role) for role in facts.placement.seats})
    except (ConfigError, ImportError) as error:
        return f"unknown: {error}"
    if machine is None:
        return "its processes aren't on the cores of this machine; task=plan shows their memory"
    refusal = explain_refusal(machine, facts)
    if problem := refusal or "; ".join(describe_shortage(machine, facts)):
        return problem
    return f"about {size(machine.held)} of {size(machine.limit)} ({machine.sums})"


def has_slots(facts: RunFacts) -> bool:
    """Whether this machine has the slots of the placement."""
    try:
        check_machine(facts.config.cluster, facts.placement)
    except ConfigError:
        return False
    return True


def list_certain(uses: list[MemoryUse]) -> list[MemoryUse]:
    return [use for use in uses if use.kind in CERTAIN]


def _hold_at_once(facts: RunFacts, uses: Mapping[str, list[MemoryUse]]) -> float:
    """The most that the processes of these roles hold together. A process of several cores counts on its first."""
    seats = [seat for seat in everybody(facts.placement) if seat.role in uses]
    places = {(seat.pool, seat.slots[0]) for seat in seats}
    return sum(
        sum_held_memory(facts, pool, [seat for seat in seats if (seat.pool, seat.slots[0]) == (pool, slot)], uses)
        for pool, slot in places
    )


def explain_refusal(machine: MachineMemory, facts: RunFacts) -> str:
    """Why the run can't start here, and what to type. Empty if it may."""
    if machine.certain <= machine.limit:
        return ""
    seats = facts.placement.seats
    certain = {role: total(list_certain(held)) * len(seats[role]) for role, held in machine.uses.items()}
    each = ", ".join(f"{role} {size(held)}" for role, held in certain.items() if held)
    has = f"this machine has {size(machine.limit)} of memory, and the run holds {size(machine.certain)} in"
    if machine.certain - machine.last_pushes <= machine.limit:
        return f"{has} weights and optimizer and {LAST_PUSHES} ({size(machine.last_pushes)}); type sync.delta=false"
    most = max(certain, key=certain.__getitem__)
    return f"{has} weights and optimizer alone ({each}); {most} takes most: {'; '.join(shrink_weights(most, facts))}"


def describe_shortage(machine: MachineMemory, facts: RunFacts) -> list[str]:
    """A warning if the run may not fit: what takes most, and what makes it smaller."""
    if machine.held <= machine.limit:
        return []
    need = f"this machine has {size(machine.limit)} of memory, and the run may need {size(machine.held)}"
    if machine.held - machine.last_pushes <= machine.limit:
        return [f"{need} ({machine.sums}); type sync.delta=false"]
    most = max(machine.uses, key=machine.by_role.__getitem__)
    held = machine.uses[most]
    if not held:
        return [f"{need} ({machine.sums})"]
    largest = max(held, key=lambda use: use.num_bytes)
    remedies = [*([remedy({most}, facts)] if largest.kind not in CERTAIN else []), *shrink_weights(most, facts)]
    return [
        f"{need} ({machine.sums}); most is {size(largest.num_bytes)} of {most}, {largest.what}: {'; '.join(remedies)}"
    ]


def shrink_weights(role: str, facts: RunFacts) -> Iterator[str]:
    """What makes a role's weights and optimizer smaller."""
    config = facts.config
    if role == CRITIC:
        yield "choose an estimator without a critic, as in algorithm=grpo critic=none"
        return
    trained = {learner: model for model, learner in config.learners.items()}
    model = config.models.get(trained.get(role, role))
    if model is None:  # a meta-RM
        yield f"give a smaller {role}.path"
        return
    if is_learning(role) and not model.lora.learns:
        yield f"type {model.key}.lora.rank=16 with ten times the learning rate, which trains adapters alone"
    if is_learning(role) and model.lora.learns and config.train.dtype != "bfloat16":
        yield "type train.dtype=bfloat16"
    if not is_learning(role) and model.dtype != "bfloat16":
        yield f"type {model.key}.dtype=bfloat16"
    yield f"give a smaller {model.key}.path"
