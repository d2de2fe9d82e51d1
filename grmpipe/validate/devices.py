"""What a GPU makes of a configuration: shares of its memory that can't be had, choices that are slow there.

Refusals are ConfigErrors that name the key and what to type; notes are sentences for the user. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from grmpipe.config.roles import device_of, engine_config_of, engines_sleep, option_key, options_of, shares_engine
from grmpipe.config.run_config import ConfigError, RunConfig
from models.lm.footprint import Footprint
from models.settings import SglangConfig, VllmConfig
from scheduler.placement import SERVED_ROLES, Placement

LARGE = 1e9  # parameters: from here on the embedded engine, which runs without graphs, holds a GPU back


def check_shares(config: RunConfig, placement: Placement) -> None:
    """Engines that hold a GPU's memory at the same time don't ask for more than all of it."""
    roles = [role for role in SERVED_ROLES if role in placement.seats and device_of(role, placement) == "cuda"]
    asked = {role: share for role in roles if (share := share_asked(role, config)) is not None}
    if len(asked) < 2 or not sum(asked.values()) > 1:
        return
    blocks = [{(seat.pool, slot) for seat in placement.seats[role] for slot in seat.slots} for role in asked]
    pool = placement.seats["policy"][0].pool
    by_turns = all(engines_sleep(role, config, placement) for role in asked) or shares_engine(config, placement)
    if not blocks[0] & blocks[1] or (placement.elastic_slots(pool) and by_turns):
        return
    keys = {role: option_key(role, config, share_name(role, config)) for role in asked}
    told = " and ".join(f"{keys[role]}={share:g} ({role})" for role, share in asked.items())
    half = " ".join(f"{role}.engine_options.{share_name(role, config)}=0.4" for role in asked)
    raise ConfigError(
        f"{keys['grm']}: the engines on the GPUs of pool {pool} ask for {sum(asked.values()):g} of each: {told}; "
        f"type {half}, or for vLLM null: the memory that the models leave is then divided"
    )


def share_asked(role: str, config: RunConfig) -> float | None:
    engine = engine_config_of(role, config)
    if isinstance(engine, VllmConfig):
        return engine.gpu_memory_utilization
    return engine.mem_fraction if isinstance(engine, SglangConfig) and not engine.urls else None


def share_name(role: str, config: RunConfig) -> str:
    return "gpu_memory_utilization" if isinstance(engine_config_of(role, config), VllmConfig) else "mem_fraction"


def device_notes(config: RunConfig, placement: Placement, footprints: Mapping[str, Footprint | None]) -> list[str]:
    """What is allowed on a GPU, and maybe not meant. footprints: by served role, as far as they are known."""
    notes = []
    on_gpus = [role for role in placement.seats if device_of(role, placement) == "cuda"]
    exact = {role: f"{role}.dtype" for role in SERVED_ROLES} | {"learner": "train.dtype", "critic": "critic.dtype"}
    for role in (role for role in on_gpus if role in exact and dtype_of(role, config) == "float32"):
        notes.append(
            f"{exact[role]}: {role} computes in float32 on a GPU, without flash attention and without TF32: slow, and "
            f"with twice the memory; type {exact[role]}=bfloat16"
        )
    for role in (role for role in on_gpus if role in SERVED_ROLES and options_of(role, config).engine == "embedded"):
        footprint = footprints.get(role)
        if footprint is not None and footprint.num_parameters > LARGE:
            notes.append(
                f"{role}.engine: the embedded engine serves {footprint.num_parameters / 1e9:.2g} B parameters on a GPU "
                f"without graphs or paged memory, several times slower than vLLM; type {role}.engine=vllm"
            )
    if "learner" in on_gpus and not config.train.recomputes and is_large(footprints.get("policy")):
        notes.append(
            "train.activation_checkpointing: without it the activations of all layers stay on the GPU; type "
            "train.activation_checkpointing=true"
        )
    return notes


def dtype_of(role: str, config: RunConfig) -> str:
    if role in SERVED_ROLES:
        return options_of(role, config).dtype
    return (config.critic.dtype or config.train.dtype) if role == "critic" else config.train.dtype


def is_large(footprint: Footprint | None) -> bool:
    return footprint is not None and footprint.num_parameters > LARGE
