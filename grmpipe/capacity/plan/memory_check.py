"""Refuses slots that certainly can't hold the memory of their processes, before a run starts.

Weights, gradients and moments are certain. A plan warns of what depends on lengths (keys and values, activations).
"""

from __future__ import annotations

from grmpipe.capacity.plan.memory import Part, everybody, held_at_once, memory_parts, size
from grmpipe.capacity.plan.shares import shares_of, undecided, with_shares
from grmpipe.capacity.plan.survey import Sized, Survey, find_devices, with_memory
from grmpipe.config.run_config import ConfigError
from grmpipe.validate.data import Data
from grmpipe.validate.prepare import Prepared
from models.lm.footprint import footprint_of
from scheduler.devices import GB

CERTAIN = ("weights", "state", "moments")


def divide_gpus(prepared: Prepared) -> Prepared:
    """The run with the shares of engines that divide a GPU. Raises ConfigError if nothing is left for one of them."""
    if not any(pool.resource == "gpu" for pool in prepared.placement.pools.values()):
        return prepared
    survey = survey_of(prepared)
    shares = shares_of(survey)
    config = with_shares(survey, shares)
    for role in undecided(survey.under(config)):
        pool = survey.placement.seats[role][0].pool
        raise ConfigError(
            f"placement.roles.{role}.pool: no memory is left for {role}'s keys and values on the GPUs of pool {pool}, "
            f"after weights, the learner and its activations; give {role} a separate pool, lower "
            f"train.micro_batch_tokens, or set {role}.engine_options.gpu_memory_utilization yourself; task=plan shows "
            "the memory by part"
        )
    return prepared.under(config)


def check_memory(prepared: Prepared) -> None:
    """Check slots with known memory, and models that are here. Raises ConfigError."""
    placement = with_memory(prepared.placement, find_devices(prepared.config))
    if prepared.config.cluster.address is not None or not any(pool.memory_gb for pool in placement.pools.values()):
        return
    survey = survey_of(prepared)
    parts = {
        role: [part for part in memory_parts(survey, role) if part.kind in CERTAIN] for role in survey.placement.seats
    }
    for pool in survey.placement.pools:
        check_pool(survey, pool, parts)


def survey_of(prepared: Prepared) -> Survey:
    devices = find_devices(prepared.config)
    return Survey(
        config=prepared.config,
        placement=with_memory(prepared.placement, devices),
        roles=prepared.roles,
        data=Data(train=(), held_out=prepared.held_out),
        models=sized(prepared),
        devices=devices,
        unchecked=(),
    )


def check_pool(survey: Survey, name: str, parts: dict[str, list[Part]]) -> None:
    pool = survey.placement.pools[name]
    for slot in range(pool.slots if pool.memory_gb else 0):
        seats = [seat for seat in everybody(survey.placement) if seat.pool == name and slot in seat.slots]
        here = [seat for seat in seats if seat.role in parts]
        held = held_at_once(survey, name, here, parts)
        if pool.memory_gb and held > pool.memory_gb * GB:
            each = ", ".join(
                f"{seat.role} {size(sum(part.num_bytes for part in parts[seat.role]))}"
                for seat in here
                if parts[seat.role]
            )
            apart = "give the roles separate pools, " if len(here) > 1 else ""
            raise ConfigError(
                f"placement.pools.{name}.memory_gb: {pool.resource} slot {slot} has {pool.memory_gb:g} GB, and the "
                f"processes on it hold {size(held)} at once in weights and optimizer alone ({each}); {apart}split "
                "models over more slots (replicas of a learner, slots_per_replica of an engine), or use larger ones; "
                "task=plan shows all memory by part"
            )


def sized(prepared: Prepared) -> dict[str, Sized]:
    """Role -> sized model; a model that serves two roles has one footprint."""
    found = {
        model.name: Sized(
            role=model.name, model=model, footprint=footprint_of(model.path), context_tokens=model.context_tokens
        )
        for model in prepared.models
    }
    if prepared.critic is not None:
        footprint = footprint_of(prepared.critic.path)
        found["critic"] = Sized(role="critic", model=None, footprint=footprint, context_tokens=0)
    return found
