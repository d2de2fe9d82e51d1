"""Checks of GPUs: shares of memory that exceed it, and notes on choices that are slow there.

Refusals are ConfigErrors that name the key and what to type; notes are sentences for the user. Starts nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from grmpipe.config.roles import Roles
from grmpipe.config.run_config import ConfigError, RunConfig
from models.lm.footprint import Footprint
from scheduler.placement import Placement

LARGE = 1e9  # parameters from which the embedded engine, which has no CUDA graphs, slows a GPU down


def check_shares(roles: Roles, placement: Placement) -> None:
    """Check that engines that hold a GPU's memory at the same time don't ask for more than all of it."""
    asked = {
        role.name: share
        for role in roles.seated
        if role.device == "cuda" and (share := role.engine.memory.share) is not None
    }
    if len(asked) < 2 or not sum(asked.values()) > 1:
        return
    blocks = [{(seat.pool, slot) for seat in placement.seats[role] for slot in seat.slots} for role in asked]
    served = [roles.served[name] for name in asked]
    pool = served[0].pool
    by_turns = all(role.frees_device for role in served) or any(role.shares_with for role in served)
    meet = any(one & other for one, other in itertools.combinations(blocks, 2))
    if not meet or (placement.elastic_slots(pool) and by_turns):
        return
    keys = {role.name: role.option_key(role.engine.memory.share_option) for role in served}
    settings = " and ".join(f"{keys[role]}={share:g} ({role})" for role, share in asked.items())
    half = " ".join(f"{role.key}.engine_options.{role.engine.memory.share_option}=0.4" for role in served)
    raise ConfigError(
        f"{keys[served[-1].name]}: the engines on the GPUs of pool {pool} ask for {sum(asked.values()):g} of each: "
        f"{settings}; type {half}, or for vLLM null: the memory that the models leave is then divided"
    )


def device_notes(config: RunConfig, roles: Roles, footprints: Mapping[str, Footprint | None]) -> list[str]:
    """Notes on what is allowed on a GPU but may not be meant. footprints: role -> footprint, None if unknown."""
    notes = []
    on_gpus = [role for role in roles.values() if role.device == "cuda"]
    for role in (role for role in on_gpus if role.dtype_key and role.dtype == "float32"):
        notes.append(
            f"{role.dtype_key}: {role.name} computes in float32 on a GPU, without flash attention and without TF32: "
            f"slow, and with twice the memory; type {role.dtype_key}=bfloat16"
        )
    for role in (role for role in roles.seated if role.device == "cuda" and role.engine.memory.grows_cache):
        footprint = footprints.get(role.name)
        if footprint is not None and footprint.num_parameters > LARGE:
            notes.append(
                f"{role.key}.engine: the {role.model.engine} engine serves {footprint.num_parameters / 1e9:.2g} B "
                "parameters on a GPU without graphs or paged memory, several times slower than vLLM; type "
                f"{role.key}.engine=vllm"
            )
    on_gpu = {role.name for role in on_gpus}
    if "learner" in on_gpu and not config.train.activations.recomputes and is_large(footprints.get("policy")):
        notes.append(
            "train.activation_checkpointing: without it the activations of all layers stay on the GPU; type "
            "train.activation_checkpointing=full"
        )
    return notes


def is_large(footprint: Footprint | None) -> bool:
    return footprint is not None and footprint.num_parameters > LARGE
