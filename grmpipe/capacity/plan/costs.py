"""The work of a step and its costs, for a planned run: by roofline, or by a profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from grmpipe.capacity.cost import (
    DRIVER_REQUEST_S,
    Costs,
    LearnerSpeed,
    ModelSizes,
    engine_speed,
    learner_speed,
    parallel_gain,
    switch_time_s,
    sync_time_s,
)
from grmpipe.capacity.lower_bound import CRITIC, LEARNING, RoleWork, StepWork
from grmpipe.capacity.plan.candidates import Seating
from grmpipe.capacity.plan.memory import kv_room
from grmpipe.capacity.plan.profile import Lengths, Profile
from grmpipe.capacity.plan.survey import Sized, Survey, pool_with_memory
from grmpipe.config.critic import critic_train
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.judge.grm import estimated_tokens
from grmpipe.judge.prompt import JudgePrompt
from models.types import EngineSpeed, Message
from scheduler.devices import DeviceSpec

SAMPLED_PROMPTS = 64  # prompts for their mean length


class CostUnknown(ConfigError):
    """The device of a pool is unknown, and no profile has the costs: the plan continues without times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """A role's processes in a plan. `pool`: a pool of the configuration."""

    seating: Seating
    pool: str


# -- work ----------------------------------------------------------------------------------------------------------


def step_work(survey: Survey, profile: Profile | None) -> StepWork:
    """The work of a step at mean lengths: those that are set, else those of the profile, else half of the maximum."""
    config, train = survey.config, survey.config.train
    rollouts = train.groups_per_batch * train.group_size
    packed = train.groups_per_batch if train.prefix_sharing else rollouts  # prompts that go through the learner
    played = lengths_of("policy", survey, profile)
    engines = {"policy": RoleWork(requests=rollouts, prompt_tokens=played.prompt_tokens, new_tokens=played.new_tokens)}
    if "grm" in config.roles:
        judged = lengths_of("grm", survey, profile)
        asked = train.groups_per_batch * config.judge.judgements_of_group(train.group_size)
        engines["grm"] = RoleWork(requests=asked, prompt_tokens=judged.prompt_tokens, new_tokens=judged.new_tokens)
    return StepWork(
        engines=engines,
        learner_tokens=packed * played.prompt_tokens + rollouts * played.new_tokens,
        groups=train.groups_per_batch,
        max_staleness=train.max_staleness,
        critic_tokens=rollouts * (played.prompt_tokens + played.new_tokens) if config.critic.enabled else 0.0,
    )


def lengths_of(role: str, survey: Survey, profile: Profile | None) -> Lengths:
    config = survey.config
    set_tokens = config.plan.rollout_tokens if role == "policy" else config.plan.judgement_tokens
    most = config.rollout.max_new_tokens if role == "policy" else config.judge.max_new_tokens
    if profile is not None and role in profile.lengths:
        measured = profile.lengths[role]
        return replace(measured, new_tokens=set_tokens) if set_tokens else measured
    prompt_tokens = policy_prompt_tokens(survey)
    if role == "grm":
        shown = config.judge.responses_shown(config.train.group_size)
        prompt_tokens = judge_prompt_tokens(survey) + shown * lengths_of("policy", survey, profile).new_tokens
    return Lengths(prompt_tokens=prompt_tokens, new_tokens=set_tokens or most / 2)


def policy_prompt_tokens(survey: Survey) -> float:
    prompts = survey.data.train[:SAMPLED_PROMPTS]
    return fmean(num_tokens(survey.models["policy"], prompt.messages) for prompt in prompts)


def judge_prompt_tokens(survey: Survey) -> float:
    """The mean tokens of a judge's prompt without the judged answer."""
    judge = survey.config.judge
    template = JudgePrompt.of(judge)
    asked = [template.render(prompt, *template.blanks, principles="") for prompt in survey.data.train[:SAMPLED_PROMPTS]]
    return fmean(num_tokens(survey.models["grm"], messages) for messages in asked)


def num_tokens(sized: Sized, messages: tuple[Message, ...]) -> int:
    if sized.model is not None:
        return len(sized.model.renderer.render(messages))
    return sum(estimated_tokens(message.content) for message in messages)


def assumptions(survey: Survey, profile: Profile | None) -> str:
    """The sources of lengths and costs, in one line."""
    work = step_work(survey, profile)
    lengths = ", ".join(
        f"{asked.new_tokens:.0f} tokens per {'rollout' if role == 'policy' else 'judgement'}"
        for role, asked in work.engines.items()
    )
    source = f"measured in {survey.config.plan.profile}" if profile else "estimated from the devices' data sheets"
    return f"{source}; {lengths} on average"


# -- costs ---------------------------------------------------------------------------------------------------------


def costs_of(
    survey: Survey,
    profile: Profile | None,
    seated: Mapping[str, Seated],
    speeds: dict[tuple[str, int, str], EngineSpeed] | None = None,
) -> Costs:
    """The costs of a seating of all roles. `speeds`: a cache of engine speeds by role, width and pool. Raises
    CostUnknown.
    """
    known = {} if speeds is None else speeds
    engines = {}
    for role, where in seated.items():
        key = (role, where.seating.width, where.pool)
        if role not in LEARNING:
            engines[role] = known[key] = known.get(key) or speed_of(role, survey, profile, where)
    weights = {role: weight_bytes(role, survey) for role in engines}
    learner = seated["learner"]
    return Costs(
        engines=engines,
        learner=learner_of(survey, profile, learner),
        critic=critic_of(survey, profile, seated[CRITIC]) if CRITIC in seated else None,
        sync_s=sync_of(survey, profile, learner, weights["policy"]),
        switch_s=switch_of(survey, seated, weights),
        driver_request_s=driver_of(survey, profile),
        cores=cores_of(survey),
    )


def speed_of(role: str, survey: Survey, profile: Profile | None, where: Seated) -> EngineSpeed:
    """The speed of one engine of a role: measured if the profile has the same model on the same kind of engine."""
    engine = survey.roles.served[role].engine
    assert not engine.outside, "an external judge has no slots"
    width = where.seating.width if survey.config.placement.pools[where.pool].resource == "gpu" else 1
    kv_bytes = kv_bytes_of(role, survey, where, width)
    if profile is not None and role in profile.engines and measured_alike(role, survey.config, profile.config):
        speed = scaled(profile.engines[role].speed, parallel_gain(width) / parallel_gain(profiled_width(role, profile)))
        per_token = kv_bytes_per_token(role, survey)
        return replace(speed, max_rows=engine.max_rows, kv_tokens=int(kv_bytes / per_token) if per_token else 0)
    device = device_for(where.pool, survey)
    return engine_speed(sizes_of(role, survey), device, num_slots=width, max_rows=engine.max_rows, kv_bytes=kv_bytes)


def measured_alike(role: str, planned: RunConfig, measured: RunConfig) -> bool:
    now, then = planned.models[role], measured.models[role]
    return (now.path, now.engine, now.dtype) == (then.path, then.engine, then.dtype)


def profiled_width(role: str, profile: Profile) -> int:
    where = profile.config.placement.roles[role]
    return where.slots_per_replica if profile.config.placement.pools[where.pool].resource == "gpu" else 1


def scaled(speed: EngineSpeed, gain: float) -> EngineSpeed:
    return replace(
        speed,
        step_s=speed.step_s / gain,
        row_s=speed.row_s / gain,
        cached_token_s=speed.cached_token_s / gain,
        prefill_token_s=speed.prefill_token_s / gain,
    )


def kv_bytes_of(role: str, survey: Survey, where: Seated, width: int) -> float:
    """Memory of an engine for keys and values; 0 if only its rows are limited."""
    engine, sized = survey.roles.served[role].engine, survey.models[role]
    if engine.grows_cache or engine.joined or sized.footprint is None:
        return 0.0
    room = kv_room(
        engine,
        pool_with_memory(survey.config.placement.pools[where.pool], survey.devices[where.pool]),
        weight_bytes(role, survey) / width,
    )
    return room.num_bytes * width if room is not None else 0.0


def learner_of(survey: Survey, profile: Profile | None, where: Seated) -> LearnerSpeed:
    """The speed of a learner. A profile's learner is scaled to this number of ranks."""
    train, ranks = survey.config.train, where.seating.replicas
    alike = profile is not None and profile.config.policy.path == survey.config.policy.path
    if profile is not None and profile.learner is not None and alike:
        share = profile.config.placement.roles["learner"].replicas / ranks
        return LearnerSpeed(token_s=profile.learner.token_s * share, step_s=profile.learner.step_s * share)
    return learner_speed(
        sizes_of("policy", survey).num_parameters,
        device_for(where.pool, survey),
        ranks=ranks,
        dtype=train.dtype,
        checkpointing=train.recomputes,
    )


def critic_of(survey: Survey, profile: Profile | None, where: Seated) -> LearnerSpeed:
    """The speed of a critic: measured if the profile has the policy's model, otherwise estimated."""
    config, train = survey.config, critic_train(survey.config.critic, survey.config.train)
    if config.critic.path is None and train.dtype == config.train.dtype:
        return learner_of(survey, profile, where)
    footprint = survey.models[CRITIC].footprint
    if footprint is None:
        raise CostUnknown("critic.path: the model's size is unknown here; type critic.path=null")
    return learner_speed(
        footprint.num_parameters,
        device_for(where.pool, survey),
        ranks=where.seating.replicas,
        dtype=train.dtype,
        checkpointing=train.recomputes,
    )


def sync_of(survey: Survey, profile: Profile | None, where: Seated, num_bytes: float) -> float:
    alike = profile is not None and profile.config.policy.path == survey.config.policy.path
    if profile is not None and profile.sync_s is not None and alike:
        return profile.sync_s
    return sync_time_s(num_bytes, device_for(where.pool, survey))


def driver_of(survey: Survey, profile: Profile | None) -> float:
    """Time of the driver process per request; 0 if engines run in the same process."""
    if survey.config.cluster.kind == "inprocess":
        return 0.0
    return DRIVER_REQUEST_S if profile is None or profile.driver_request_s is None else profile.driver_request_s


def cores_of(survey: Survey) -> int:
    """The cores of this machine, unless the configuration sets or needs more."""
    pools = survey.placement.pools.values()
    asked = sum(pool.slots for pool in pools if pool.resource == "cpu")
    return survey.config.plan.cores or max(asked, os.cpu_count() or 1)


def switch_of(survey: Survey, seated: Mapping[str, Seated], weights: Mapping[str, float]) -> float:
    """The time of the slowest change of role; the embedded engine keeps both models."""
    dearest = 0.0
    for role, num_bytes in weights.items():
        device = survey.devices[seated[role].pool]
        if device is not None and survey.roles.served[role].engine.frees_gpu:
            dearest = max(dearest, switch_time_s(num_bytes / seated[role].seating.width, device))
    return dearest


# -- sizes ---------------------------------------------------------------------------------------------------------


def sizes_of(role: str, survey: Survey) -> ModelSizes:
    footprint, dtype = survey.models[role].footprint, survey.roles.served[role].dtype
    if footprint is None:
        raise CostUnknown(f"{role}.shape: the model's size is unknown; declare it, as in conf/policy/qwen3_8b.yaml")
    return ModelSizes(
        num_parameters=footprint.num_parameters,
        weight_bytes=footprint.weight_bytes(dtype),
        kv_bytes_per_token=footprint.kv_bytes_per_token(dtype),
        dtype=dtype,
    )


def weight_bytes(role: str, survey: Survey) -> float:
    footprint = survey.models[role].footprint
    return footprint.weight_bytes(survey.roles.served[role].dtype) if footprint else 0.0


def kv_bytes_per_token(role: str, survey: Survey) -> int:
    footprint = survey.models[role].footprint
    return footprint.kv_bytes_per_token(survey.roles.served[role].dtype) if footprint else 0


def device_for(pool: str, survey: Survey) -> DeviceSpec:
    device = survey.devices[pool]
    if device is None:
        raise CostUnknown(
            f"placement.pools.{pool}.device: the GPU is unknown; type placement.pools.{pool}.device=h100 "
            "(or its name), or plan.profile=<an earlier run>"
        )
    return device
