"""Refuses slots, or a machine, that certainly can't hold the memory of their processes, before a run starts.

Engines of vLLM that share a GPU get shares of it, if the configuration leaves them open: vLLM takes
`gpu_memory_utilization` of a whole device, including weights, and needs that much free at its start. An engine alone
gets its default; engines that share get the same number of cached tokens each.

Weights, gradients and moments are certain. What depends on lengths (keys and values, activations) is warned of: by a
plan, and for the machine at a run's start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grmpipe.capacity.plan.machine import describe_shortage, explain_refusal, list_certain, measure_machine
from grmpipe.capacity.plan.memory import (
    MemoryUse,
    SlotMemory,
    engine_weights,
    everybody,
    experts_on_their_way,
    list_memory,
    memory_of_slots,
    one_at_a_time,
    own_bytes,
    size,
    total,
)
from grmpipe.capacity.plan.run_facts import RunFacts, Sized, find_devices, find_longest, with_memory
from grmpipe.config.grm import ModelEntry
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.prompts import Data
from grmpipe.models.lm.footprint import read_footprint
from grmpipe.models.settings import DEFAULT_MEMORY_SHARE
from grmpipe.roles.find_models import CRITIC
from grmpipe.roles.roles import ServedRole
from grmpipe.run.prepare import Prepared
from grmpipe.scheduler.devices import GB
from grmpipe.scheduler.placement import Seat


def divide_gpus(prepared: Prepared) -> Prepared:
    """The run with the shares of engines that divide a GPU. Raises ConfigError if nothing is left for one of them."""
    if not any(pool.resource == "gpu" for pool in prepared.placement.pools.values()):
        return prepared
    facts = collect_known(prepared)
    shares = compute_shares(facts)
    config = with_shares(facts, shares)
    for role in list_undecided(facts.under(config)):
        pool = facts.placement.seats[role][0].pool
        raise ConfigError(
            f"placement.roles.{role}.pool: no memory is left for {role}'s keys and values on the GPUs of pool {pool}, "
            f"after weights, the learner and its activations; give {role} a separate pool, lower "
            f"train.micro_batch_tokens, or set {role}.engine_options.gpu_memory_utilization yourself; task=plan shows "
            "the memory by part"
        )
    return prepared.under(config)


def check_memory(facts: RunFacts) -> list[str]:
    """Check this machine's memory and slots with known memory, for models that are here; what may not fit, in words.
    Raises ConfigError for what can't.
    """
    if facts.config.cluster.is_joined:
        return []
    uses = {role: list_memory(facts, role) for role in facts.placement.seats}
    certain = {role: list_certain(held) for role, held in uses.items()}
    for one in memory_of_slots(facts, certain):
        if one.is_overfull:
            raise ConfigError(too_full(one, certain, facts.placement.pools[one.pool].resource))
    if (machine := measure_machine(facts, uses)) is None:
        return []
    if why := explain_refusal(machine, facts):
        raise ConfigError(why)
    return describe_shortage(machine, facts)


def collect_known(prepared: Prepared) -> RunFacts:
    """What is known of a run that is about to start."""
    config, train = prepared.config, prepared.prompts.prompts
    devices = find_devices(config.placement.pools, config.plan.devices)
    return RunFacts(
        config=config,
        placement=with_memory(prepared.placement, devices),
        roles=prepared.roles,
        data=Data(train=train, held_out=prepared.held_out),
        longest_prompts=find_longest((*train, *prepared.held_out)),
        models=size_roles(prepared),
        devices=devices,
        unchecked=(),
    )


def too_full(one: SlotMemory, uses: Mapping[str, list[MemoryUse]], resource: str) -> str:
    known = {role: held for role in (seat.role for seat in one.seats) if (held := uses[role])}
    each = ", ".join(f"{role} {size(sum(use.num_bytes for use in held))}" for role, held in known.items())
    apart = "give the roles separate pools, " if len(one.seats) > 1 else ""
    return (
        f"placement.pools.{one.pool}.memory_gb: {resource} slot {one.slot} has {one.memory_gb:g} GB, and the "
        f"processes on it hold {size(one.held)} at once in weights and optimizer alone ({each}); {apart}split "
        "models over more slots (replicas of a learner, slots_per_replica of an engine), or use larger ones; "
        "task=plan shows all memory by part"
    )


def size_roles(prepared: Prepared) -> dict[str, Sized]:
    """Role -> sized model; a model that serves two roles has one footprint."""
    found = {model.name: Sized.of(model) for model in prepared.generating}
    if (critic := prepared.models.get(CRITIC)) is not None:
        found[CRITIC] = Sized(role=CRITIC, footprint=read_footprint(critic.path))
    return found


USABLE = 0.92  # share of a device; the rest is for CUDA contexts, NCCL buffers and fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """The needs of one engine on a device: bytes of its weights and of its own memory, and of one token; or the bytes
    of its cache, if set.
    """

    weights: float
    token: float
    kv: float | None = None  # engine.vllm.kv_cache_mb


def divide_memory(room: float, wishes: Mapping[str, EngineNeeds]) -> dict[str, float]:
    """Engine -> bytes, including weights, with the same number of tokens in each. Empty if they don't fit."""
    fixed = {role: wish.kv for role, wish in wishes.items() if wish.kv is not None}
    left = room - sum(wish.weights for wish in wishes.values()) - sum(fixed.values())
    token = sum(wish.token for role, wish in wishes.items() if role not in fixed)
    if left < 0 or (token and not left > 0):
        return {}
    return {
        role: wish.weights + (fixed[role] if role in fixed else left * wish.token / token)
        for role, wish in wishes.items()
    }


def list_undecided(facts: RunFacts) -> tuple[str, ...]:
    """Roles on a shared GPU whose share isn't set."""
    return tuple(
        role.name
        for role in facts.roles.hosts
        if role.device == "cuda" and role.engine.memory.shares_leftover and neighbours(facts, role.name)
    )


def neighbours(facts: RunFacts, role: str) -> list[Seat]:
    """Seats of other roles on this role's slots."""
    slots = {(seat.pool, slot) for seat in facts.placement.seats[role] for slot in seat.slots}
    others = [seat for seat in everybody(facts.placement) if seat.role != role]
    return [seat for seat in others if slots & {(seat.pool, slot) for slot in seat.slots}]


def compute_shares(facts: RunFacts) -> dict[str, float]:
    """Role -> share of the device, for roles that share one and fit."""
    open_roles, engines = list_undecided(facts), {role.name for role in facts.roles.hosts}
    shares: dict[str, float] = {}
    for role in open_roles:
        near = {seat.role for seat in neighbours(facts, role)}
        memory_gb, wish = facts.pool(role).memory_gb, find_needs(facts, role)
        if memory_gb is None or wish is None:
            shares[role] = round(DEFAULT_MEMORY_SHARE / (1 + len(near)), 2)
            continue
        memory = memory_gb * GB
        by_turns = one_at_a_time(facts, engines) if facts.pool(role).elastic else False
        awake = [other for other in open_roles if other == role or (other in near and not by_turns)]
        wishes = {other: found for other in awake if (found := find_needs(facts, other)) is not None}
        beside = near - set(awake) - (engines if by_turns else set())
        held = sum(map(count_held_beside, [facts] * len(beside), sorted(beside)))
        if bytes_of := divide_memory(USABLE * memory - held, wishes):
            shares[role] = min(bytes_of[role], at_push(facts, role, memory)) / memory
    return shares


def find_needs(facts: RunFacts, role: str) -> EngineNeeds | None:
    """The needs of a role's engine. None if the model's size is unknown."""
    footprint, served = facts.models[role].footprint, facts.roles.served[role]
    if footprint is None:
        return None
    return EngineNeeds(
        weights=engine_weights(served, footprint) / served.num_gpus
        + own_bytes(served, footprint, served.num_gpus, facts.pool(role)),
        token=footprint.kv_bytes_per_token(served.dtype, served.num_gpus) / served.num_gpus,
        kv=served.engine.memory.cache_bytes,
    )


def count_held_beside(facts: RunFacts, role: str) -> float:
    """The memory that another role holds while the engines serve: a time-shared learner holds none."""
    if role == "learner" and facts.placement.time_sharing_roles:
        return 0.0
    return total(list_memory(facts, role))


def at_push(facts: RunFacts, role: str, memory: float) -> float:
    """The most memory for the policy's engines while a time-shared learner pushes its weights."""
    footprint, served = facts.models[role].footprint, facts.roles.served[role]
    if footprint is None or not facts.config.models[role].plays or role not in facts.placement.time_sharing_roles:
        return memory
    waiting = experts_on_their_way(served, footprint, served.num_gpus, facts.pool(role))
    sent = [use for use in list_memory(facts, "learner") if use.kind == "weights"]
    return USABLE * memory - total([*sent, *waiting])


def with_shares(facts: RunFacts, shares: Mapping[str, float]) -> RunConfig:
    """The configuration with the shares as engine options of the roles."""
    config, served = facts.config, facts.roles.served
    models = {role: _with_share(model, served.get(role), shares) for role, model in config.models.items()}
    return replace(config, models=models)


def _with_share(model: ModelEntry, role: ServedRole | None, shares: Mapping[str, float]) -> ModelEntry:
    hundredths = int(shares.get(role.name, 0.0) * 100) if role is not None else 0
    if role is None or not hundredths:  # rounded down: together they must not exceed the device
        return model
    options = {**model.engine_options, role.engine.memory.share_option: hundredths / 100}
    return replace(model, engine_options=options)
