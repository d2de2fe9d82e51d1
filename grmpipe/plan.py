"""What goes where, its memory, the arithmetic of a batch: read off a configuration. Starts nothing, needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from grmpipe.config import ConfigError, RunConfig
from grmpipe.engine_checks import check_installed, check_tensor_parallel, served_roles, window_of
from grmpipe.engines import EngineOptions, Model, engine_config_of, options_of, tensor_parallel_of
from grmpipe.prepare import (
    Data,
    ModelNotHere,
    Progress,
    check_judge,
    check_machine,
    check_objective,
    check_policy,
    find_model,
    read_data,
    seat_roles,
)
from models.engines.vllm_options import CPU_KV_CACHE_MB
from models.footprint import Footprint, Heads, footprint_of, footprint_of_shape, heads_of
from models.settings import EmbeddedConfig, OpenAIConfig, SglangConfig, VllmConfig
from scheduler.placement import Placement, PoolConfig, describe

GB = 1e9
REMEDIES = {  # of an engine alone on a slot that is too small for it
    "embedded": "lower engine.embedded.max_batch_rows or engine.embedded.max_context_tokens",
    "vllm": "lower engine.vllm.kv_cache_mb, or raise slots_per_replica",
    "sglang": "lower engine.sglang.mem_fraction, or raise slots_per_replica",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A role's model as far as it is known here: by its files, or by the shape that the configuration declares."""

    role: str
    model: Model | None  # None: its files aren't here
    footprint: Footprint | None
    context_tokens: int  # 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All that a plan is made of. `unchecked` says what only the run's own machines can tell."""

    config: RunConfig
    placement: Placement
    data: Data
    models: Mapping[str, Sized]  # by role: policy, grm
    unchecked: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of a process's memory."""

    what: str
    num_bytes: float


def plan(config: RunConfig, progress: Progress) -> str:
    """Blocks of text: placement, memory, arithmetic, warnings, what could not be checked. Raises ConfigError."""
    survey = survey_run(config, progress)
    parts = {role: memory_parts(survey, role) for role in survey.placement.seats}
    blocks = [describe(survey.placement), engines(survey), memory(survey, parts), arithmetic(survey)]
    blocks += listed("warnings", overfull_slots(survey, parts))
    blocks += listed("not checked here", survey.unchecked)
    return "\n\n".join(blocks)


def survey_run(config: RunConfig, progress: Progress) -> Survey:
    """The checks of a run; those that need its machines are put off, the others still refuse."""
    placement = seat_roles(config)
    data = read_data(config)
    check_objective(config)
    unchecked = []
    for check in (lambda: check_machine(config, placement), lambda: check_installed(config)):
        try:
            check()
        except ConfigError as error:
            unchecked.append(f"{error}, or run where they are")
    models: dict[str, Sized] = {}
    for role in ("policy", "grm"):
        if role in config.roles:
            models[role], lacking = size_model(role, config, progress)
            unchecked += lacking
            check_heads(models[role], config, placement)
    if (policy := models["policy"].model) is not None:
        check_policy(config, policy, data)
    if config.judge_is_outside:
        check_judge(config, None, data)
    elif "grm" in models and (grm := models["grm"].model) is not None:
        check_judge(config, grm, data)
    return Survey(config=config, placement=placement, data=data, models=models, unchecked=tuple(unchecked))


def size_model(role: str, config: RunConfig, progress: Progress) -> tuple[Sized, list[str]]:
    """A model's sizes, and what is not known of it."""
    shape = options_of(role, config).shape
    try:
        model = find_model(role, config, progress, weights=False)
    except ModelNotHere as error:
        lacking = [f"{error} (its chat template, and whether prompts fit its window)"]
        if not shape.declared:
            lacking.append(f"memory of {role}: declare {role}.shape, as in conf/policy/qwen3_8b.yaml")
            return Sized(role=role, model=None, footprint=None, context_tokens=0), lacking
        window = window_of(role, config, shape.context_tokens)
        return Sized(role=role, model=None, footprint=footprint_of_shape(shape), context_tokens=window), lacking
    sized = Sized(role=role, model=model, footprint=footprint_of(model.path), context_tokens=model.context_tokens)
    return sized, []


def check_heads(sized: Sized, config: RunConfig, placement: Placement) -> None:
    """Can the GPUs of an engine share the model? Of what is known of it here."""
    shape = options_of(sized.role, config).shape
    if sized.model is not None:
        check_tensor_parallel(sized.role, heads_of(sized.model.path), placement)
    elif shape.declared:
        check_tensor_parallel(sized.role, Heads(query=shape.num_heads, key=shape.num_kv_heads), placement)


# -- engines -------------------------------------------------------------------------------------------------------


def engines(survey: Survey) -> str:
    """Who serves which role, and the options that differ from the engine's defaults."""
    lines = ["engines"]
    for role in served_roles(survey.config):
        kind, engine = options_of(role, survey.config).engine, engine_config_of(role, survey.config)
        num_gpus = tensor_parallel_of(role, survey.placement) if role in survey.placement.seats else 1
        where = f", tensor parallel over {num_gpus} GPUs" if num_gpus > 1 else ""
        if isinstance(engine, OpenAIConfig):
            where = f": {survey.config.grm.path} at {engine.base_url}"
        lines.append(f"  {role:<8} {kind}{where}; {changed_options(engine)}")
    return "\n".join(lines)


def changed_options(engine: EngineOptions) -> str:
    plain = type(engine)()
    values = {spec.name: getattr(engine, spec.name) for spec in fields(engine)}
    changed = [f"{name}={value}" for name, value in values.items() if value != getattr(plain, name)]
    return ", ".join(changed) or "default options"


# -- memory --------------------------------------------------------------------------------------------------------


def memory_parts(survey: Survey, role: str) -> list[Part]:
    """What one process of a role holds at most; empty where the model's size isn't known."""
    sized = survey.models["policy" if role == "learner" else role]
    if sized.footprint is None:
        return []
    if role == "learner":
        return learner_parts(survey, sized.footprint)
    return engine_parts(survey, sized, sized.footprint)


def engine_parts(survey: Survey, sized: Sized, footprint: Footprint) -> list[Part]:
    """On each GPU of an engine that several share."""
    role, options = sized.role, options_of(sized.role, survey.config)
    engine, num_gpus = engine_config_of(role, survey.config), tensor_parallel_of(role, survey.placement)
    if isinstance(engine, SglangConfig) and engine.urls:
        return [Part(what="a client; the server is elsewhere", num_bytes=0.0)]
    shared = f", over {num_gpus} GPUs" if num_gpus > 1 else ""
    weights = footprint.weight_bytes(options.dtype) / num_gpus
    held = [Part(what=f"weights{shared}", num_bytes=weights)]
    if isinstance(engine, EmbeddedConfig):
        rows, tokens = engine.max_batch_rows, sized.context_tokens
        cache = rows * tokens * footprint.kv_bytes_per_token(options.dtype)
        # It grows by copying: for a moment the old one and the new one are held.
        return [*held, Part(what=f"KV of {rows} rows x {tokens} tokens, twice while it grows", num_bytes=2 * cache)]
    room = kv_room(engine, survey.placement.pools[survey.placement.seats[role][0].pool], weights)
    if room is None:
        return held
    tokens = int(room.num_bytes * num_gpus / footprint.kv_bytes_per_token(options.dtype))
    return [*held, replace(room, what=f"{room.what}: {tokens} tokens")]


def kv_room(engine: EngineOptions, pool: PoolConfig, weights: float) -> Part | None:
    """What an engine reserves for keys and values on one device; None where that depends on the device's memory."""
    if isinstance(engine, VllmConfig) and (engine.kv_cache_mb or pool.resource == "cpu"):
        return Part(what="KV, engine.vllm.kv_cache_mb", num_bytes=(engine.kv_cache_mb or CPU_KV_CACHE_MB) << 20)
    if pool.memory_gb is None or pool.resource == "cpu":
        return None
    if isinstance(engine, VllmConfig):
        share, key = engine.gpu_memory_utilization, "engine.vllm.gpu_memory_utilization"
    else:
        assert isinstance(engine, SglangConfig)
        share, key = engine.mem_fraction, "engine.sglang.mem_fraction"
    return Part(what=f"KV, what is left of {key}={share:g}", num_bytes=max(0.0, share * pool.memory_gb * GB - weights))


def learner_parts(survey: Survey, footprint: Footprint) -> list[Part]:
    train, ranks = survey.config.train, len(survey.placement.seats["learner"])
    state = footprint.learner_state_bytes(ranks, reference=survey.config.algorithm.kl_coefficient > 0)
    activations = footprint.activation_bytes_per_token(train.dtype, checkpointing=train.activation_checkpointing)
    return [
        Part(what=f"weights, gradients and moments over {ranks} rank{'s' * (ranks > 1)}", num_bytes=state),
        Part(what="gathered layers", num_bytes=footprint.gathered_bytes(train.dtype)),
        Part(what=f"activations of {train.micro_batch_tokens} tokens",
             num_bytes=activations * train.micro_batch_tokens),
    ]  # fmt: skip


def memory(survey: Survey, parts: Mapping[str, list[Part]]) -> str:
    lines = ["memory per process, at most, by estimate"]
    for role, held in parts.items():
        if not held:
            lines.append(f"  {role:<8} not known")
            continue
        lines.append(f"  {role:<8} {size(sum(part.num_bytes for part in held))}")
        lines += [f"           {size(part.num_bytes):>8}  {part.what}" for part in held]
    return "\n".join(lines)


def overfull_slots(survey: Survey, parts: Mapping[str, list[Part]]) -> list[str]:
    """Slots whose processes want more than the pool's `memory_gb`."""
    warnings, placement = [], survey.placement
    everybody = [seat for seats in placement.seats.values() for seat in seats]
    for name, pool in placement.pools.items():
        for slot in range(pool.slots if pool.memory_gb else 0):
            here = [seat for seat in everybody if seat.pool == name and slot in seat.slots]
            wanted = sum(part.num_bytes for seat in here for part in parts[seat.role])
            if pool.memory_gb and wanted > pool.memory_gb * GB:
                who = ", ".join(seat.name for seat in here)
                warnings.append(
                    f"{name} {slot}: {who} may want {size(wanted)} of {pool.memory_gb:g} GB "
                    f"(placement.pools.{name}.memory_gb); {remedy({seat.role for seat in here}, survey.config)}"
                )
    return warnings


def remedy(roles: set[str], config: RunConfig) -> str:
    if len(roles) > 1:
        return "give the roles pools of their own"
    (role,) = roles
    if role == "learner":
        return "lower train.micro_batch_tokens, type train.activation_checkpointing=true, or add learner ranks"
    return REMEDIES[options_of(role, config).engine]


# -- arithmetic ----------------------------------------------------------------------------------------------------


def arithmetic(survey: Survey) -> str:
    config, num_prompts = survey.config, len(survey.data.train)
    train, judge = config.train, config.judge
    rollouts = train.groups_per_batch * train.group_size
    in_flight = (train.max_staleness + 1) * train.groups_per_batch
    wanted = train.num_steps * train.groups_per_batch
    judgements = rollouts * judge.num_judgements if config.judged_by_model else 0
    judged = (
        f"{rollouts} rollouts x {judge.num_judgements} judgements = {judgements} judgements, "
        f"at most {judgements * judge.max_new_tokens} tokens"
    )
    return "\n".join([
        "a step",
        f"  {train.groups_per_batch} groups x {train.group_size} siblings = {rollouts} rollouts, "
        f"at most {rollouts * config.rollout.max_new_tokens} tokens",
        f"  {judged if judgements else 'judged by a rule'}",
        f"  in flight: at most {in_flight} groups, {in_flight * train.group_size} rollouts "
        f"(max_staleness {train.max_staleness})",
        f"the run: {train.num_steps} steps, {wanted} prompts ({wanted / num_prompts:.2f} epochs of {num_prompts}), "
        f"{len(survey.data.held_out)} held out",
    ])  # fmt: skip


def listed(title: str, lines: list[str] | tuple[str, ...]) -> list[str]:
    """A block, or none where there is nothing to say."""
    return ["\n".join([title, *(f"  {line}" for line in lines)])] if lines else []


def size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
