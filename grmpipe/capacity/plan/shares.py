"""How vLLM's engines divide a GPU that they share, where the configuration leaves that open. Starts nothing.

vLLM takes `gpu_memory_utilization` of a whole device, weights and all, and wants that much free when it starts. Alone
it gets its default; beside others what they leave, with room for the same number of tokens in each engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grmpipe.capacity.plan.memory import Part, everybody, learner_parts, memory_parts, one_at_a_time
from grmpipe.capacity.plan.survey import Survey
from grmpipe.config.roles import ServedRole
from grmpipe.config.run_config import RunConfig
from models.settings import DEFAULT_MEMORY_SHARE, ModelConfig
from scheduler.devices import GB
from scheduler.placement import Seat

USABLE = 0.92  # of a device; the rest is CUDA's contexts, NCCL's buffers and what fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One engine's: bytes of its weights on a device, and of a token that it holds; or how much it shall hold."""

    weights: float
    token: float
    kv: float | None = None  # engine.vllm.kv_cache_mb


def divided(room: float, wishes: Mapping[str, Wish]) -> dict[str, float]:
    """Bytes of each engine, weights and all: as many tokens in one as in the other. Empty where they don't fit."""
    fixed = {role: wish.kv for role, wish in wishes.items() if wish.kv is not None}
    left = room - sum(wish.weights for wish in wishes.values()) - sum(fixed.values())
    token = sum(wish.token for role, wish in wishes.items() if role not in fixed)
    if left < 0 or (token and not left > 0):
        return {}
    return {
        role: wish.weights + (fixed[role] if role in fixed else left * wish.token / token)
        for role, wish in wishes.items()
    }


def undecided(survey: Survey) -> tuple[str, ...]:
    """Roles that share a GPU, whose share is what the others leave, and wasn't set."""
    return tuple(
        role.name
        for role in survey.roles.seated
        if role.device == "cuda" and role.engine.shares_leftover and neighbours(survey, role.name)
    )


def neighbours(survey: Survey, role: str) -> list[Seat]:
    """Of other roles, on the slots of this one."""
    slots = {(seat.pool, slot) for seat in survey.placement.seats[role] for slot in seat.slots}
    others = [seat for seat in everybody(survey.placement) if seat.role != role]
    return [seat for seat in others if slots & {(seat.pool, slot) for slot in seat.slots}]


def shares_of(survey: Survey) -> dict[str, float]:
    """By role, of the device; only of those that share it, and for which there is room."""
    open_roles, engines = undecided(survey), {role.name for role in survey.roles.seated}
    shares: dict[str, float] = {}
    for role in open_roles:
        near = {seat.role for seat in neighbours(survey, role)}
        memory_gb, wish = survey.pool(role).memory_gb, wish_of(survey, role)
        if memory_gb is None or wish is None:
            shares[role] = round(DEFAULT_MEMORY_SHARE / (1 + len(near)), 2)
            continue
        memory = memory_gb * GB
        by_turns = one_at_a_time(survey, engines) if survey.pool(role).elastic else False
        awake = [other for other in open_roles if other == role or (other in near and not by_turns)]
        wishes = {other: found for other in awake if (found := wish_of(survey, other)) is not None}
        beside = near - set(awake) - (engines if by_turns else set())
        held = sum(map(held_beside, [survey] * len(beside), sorted(beside)))
        if bytes_of := divided(USABLE * memory - held, wishes):
            shares[role] = min(bytes_of[role], at_push(survey, role, memory)) / memory
    return shares


def wish_of(survey: Survey, role: str) -> Wish | None:
    """None where the model's size isn't known."""
    footprint, served = survey.models[role].footprint, survey.roles.served[role]
    if footprint is None:
        return None
    return Wish(
        weights=footprint.weight_bytes(served.dtype) / served.num_gpus,
        token=footprint.kv_bytes_per_token(served.dtype) / served.num_gpus,
        kv=served.engine.set_cache_bytes,
    )


def held_beside(survey: Survey, role: str) -> float:
    """What another role holds while the engines serve: a learner that is time-shared has gone."""
    if role == "learner" and survey.placement.time_sharing_roles:
        return 0.0
    return total(parts_beside(survey, role))


def parts_beside(survey: Survey, role: str) -> Sequence[Part]:
    if role == "grm_learner":
        footprint = survey.models["grm"].footprint
        return [] if footprint is None else learner_parts(survey, footprint, len(survey.placement.seats[role]))
    if role != "learner" and role not in survey.models:
        return []  # a meta-RM: it has no batches of its own to speak of
    return memory_parts(survey, role)


def at_push(survey: Survey, role: str, memory: float) -> float:
    """The most for the policy's engines while a learner that is time-shared brings them its weights."""
    if role != "policy" or role not in survey.placement.time_sharing_roles:
        return memory
    return USABLE * memory - total([part for part in memory_parts(survey, "learner") if part.kind == "weights"])


def total(parts: Sequence[Part]) -> float:
    return sum(part.num_bytes for part in parts)


def with_shares(survey: Survey, shares: Mapping[str, float]) -> RunConfig:
    """The run's configuration, with the shares as the roles' own engine options."""
    config, served = survey.config, survey.roles.served
    return replace(
        config,
        policy=_with_share(config.policy, served.get("policy"), shares),
        grm=_with_share(config.grm, served.get("grm"), shares),
    )


def _with_share(model: ModelConfig, role: ServedRole | None, shares: Mapping[str, float]) -> ModelConfig:
    hundredths = int(shares.get(role.name, 0.0) * 100) if role is not None else 0
    if role is None or not hundredths:  # rounded down: together they must not ask for more than there is
        return model
    options = {**model.engine_options, role.engine.share_option: hundredths / 100}
    return replace(model, engine_options=options)
