"""Refuses slots, or a machine, that certainly can't hold the memory of their processes, before a run starts.

Weights, gradients and moments are certain. What depends on lengths (keys and values, activations) is warned of: by a
plan, and for the machine at a run's start.
"""

from collections.abc import Mapping

from grmpipe.capacity.plan.gpu_shares import compute_shares, list_undecided, with_shares
from grmpipe.capacity.plan.machine import describe_shortage, explain_refusal, list_certain, measure_machine
from grmpipe.capacity.plan.memory import MemoryUse, SlotMemory, list_memory, memory_of_slots, size
from grmpipe.capacity.plan.run_facts import RunFacts, Sized, find_devices, find_longest, with_memory
from grmpipe.config.run_config import ConfigError
from grmpipe.data.prompts import Data
from grmpipe.models.lm.footprint import read_footprint
from grmpipe.roles.find_models import CRITIC
from grmpipe.run.prepare import Prepared


def divide_gpus(prepared: Prepared) -> Prepared:
    """The run with the shares of engines that divide a GPU. Raises ConfigError if nothing is left for one of them."""
    if not any(pool.resource == "gpu" for pool in prepared.placement.pools.values()):
        return prepared
    facts = facts_for_check(prepared)
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


def check_memory(prepared: Prepared) -> list[str]:
    """Check this machine's memory and slots with known memory, for models that are here; what may not fit, in words.
    Raises ConfigError for what can't.
    """
    if prepared.config.cluster.is_joined:
        return []
    facts = facts_for_check(prepared)
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


def facts_for_check(prepared: Prepared) -> RunFacts:
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
