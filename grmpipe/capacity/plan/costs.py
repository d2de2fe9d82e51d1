"""The costs of a planned run's processes, by roofline."""

import math
import os
from collections.abc import Mapping

from grmpipe.capacity.cost import (
    DRIVER_REQUEST_S,
    Costs,
    LearnerModel,
    LearnerSpeed,
    ModelSizes,
    PushSize,
    engine_speed,
    estimate_read_s,
    learner_speed,
    switch_time_s,
    sync_time_s,
)
from grmpipe.capacity.lower_bound import CRITIC, LEARNER, META_RM, POLICY
from grmpipe.capacity.plan.memory import engine_weights, kv_room
from grmpipe.capacity.plan.run_facts import PlacedRoles, RunFacts
from grmpipe.capacity.plan.work import pack_group, pack_judgement
from grmpipe.config.critic import critic_train
from grmpipe.config.model_training import find_training
from grmpipe.config.run_config import ConfigError
from grmpipe.config.train import TrainConfig
from grmpipe.models.lm.flops import PackedSizes
from grmpipe.models.lm.footprint import BYTES, BYTES_OF_ADAM, Footprint
from grmpipe.models.settings import LoraConfig
from grmpipe.models.types import EngineSpeed
from grmpipe.models.weights.bucket_size import choose_bucket_bytes
from grmpipe.models.weights.transports import transport_kind
from grmpipe.roles.role_placement import resolve_transport
from grmpipe.roles.roles import ServedRole
from grmpipe.scheduler.devices import DeviceSpec

NO_ADAPTERS = LoraConfig()


class CostUnknown(ConfigError):
    """The device of a pool is unknown: the plan continues without times."""


# -- costs ---------------------------------------------------------------------------------------------------------


def estimate_costs(facts: RunFacts) -> Costs:
    """The costs of all roles, as they are placed. Raises CostUnknown."""
    seated = {role: facts.describe_seats(role) for role in facts.placement.seats}
    engines = {
        role: estimate_engine_speed(role, facts, where) for role, where in seated.items() if role in facts.roles.served
    }
    # The roles that train judging models -> the roles whose weights they train.
    trained = {learner: model for model, learner in facts.config.learners.items() if model in facts.config.trained_grms}
    learner = seated[LEARNER]
    return Costs(
        engines=engines,
        learner=estimate_learner(POLICY, facts, learner),
        critic=estimate_critic(facts, seated[CRITIC]) if CRITIC in seated else None,
        grm_learners={role: estimate_learner(model, facts, seated[role]) for role, model in trained.items()},
        scorer_token_s={
            role: estimate_scorer(role, facts, where) for role, where in seated.items() if role in facts.scorer_dtypes
        },
        sync_s=push_s(POLICY, facts, learner),
        grm_sync_s={role: push_s(model, facts, seated[role]) for role, model in trained.items()},
        switch_s=estimate_switch(facts, seated),
        driver_request_s=0.0 if facts.config.cluster.kind == "inprocess" else DRIVER_REQUEST_S,
        cores=count_cores(facts),
    )


def estimate_engine_speed(role: str, facts: RunFacts, where: PlacedRoles) -> EngineSpeed:
    """The speed of one engine of a role, by the data sheet."""
    engine = facts.roles.served[role].engine
    assert not engine.outside, "an external judge has no slots"
    width = where.width if facts.config.placement.pools[where.pool].resource == "gpu" else 1
    kv_bytes = estimate_kv_bytes(role, facts, width)
    device = device_for(where.pool, facts)
    return engine_speed(
        measure_sizes(role, facts, width), device, num_slots=width, max_rows=engine.max_rows, kv_bytes=kv_bytes
    )


def estimate_kv_bytes(role: str, facts: RunFacts, width: int) -> float:
    """Memory of an engine for keys and values; 0 if only its rows are limited."""
    engine, sized = facts.roles.served[role].engine, facts.models[role]
    if engine.memory.grows_cache or engine.joined or sized.footprint is None:
        return 0.0
    room = kv_room(facts.roles.served[role], sized.footprint, width, facts.pool(role))
    return room.num_bytes * width if room is not None else 0.0


def num_adapters(lora: LoraConfig, footprint: Footprint) -> int:
    """The parameters of adapters; 0 if there are none."""
    return footprint.adapter_parameters(lora.rank, lora.target_modules) if lora.learns else 0


def estimate_learner(model: str, facts: RunFacts, where: PlacedRoles) -> LearnerSpeed:
    """The speed of the learner of a served model, by the data sheet."""
    config, footprint = facts.config, require_footprint(model, facts)
    train = find_training(config, model).train
    packed = pack_group(facts) if config.models[model].plays else pack_judgement(model, facts)
    return speed_by_sheet(train, footprint, facts, where, packed, config.models[model].lora)


def speed_by_sheet(
    train: TrainConfig,
    footprint: Footprint,
    facts: RunFacts,
    where: PlacedRoles,
    packed: PackedSizes,
    lora: LoraConfig = NO_ADAPTERS,
) -> LearnerSpeed:
    activations = train.activations
    inputs = footprint.num_layers * footprint.hidden_size * BYTES[train.dtype] if activations.offload else 0.0
    adapters = num_adapters(lora, footprint)
    # An adapter of any rank reads the input of its layer, and adds to the output.
    beside = footprint.adapter_parameters(1, lora.target_modules) if adapters else 0
    trained = adapters or footprint.num_parameters
    attended = sum(each * packed.pairs(window) for window, each in footprint.attention_flops.items())
    return learner_speed(
        LearnerModel(
            num_parameters=footprint.num_parameters,
            num_active=footprint.matrix_weights,
            num_adapters=adapters,
            values_per_token=footprint.values_per_token + beside,
            attention_flops=attended / packed.num_tokens,
            is_mixture=footprint.num_expert_parameters > 0,
        ),
        device_for(where.pool, facts),
        ranks=where.replicas,
        dtype=train.dtype,
        checkpointing=activations.recomputes,
        keeps_attention=activations.checkpointing == "selective",
        copies=train.parallel.dp_replicate,
        token_bytes_to_host=inputs,
        step_bytes_to_host=BYTES_OF_ADAM * trained if train.optimizer.offload else 0.0,
    )


def estimate_critic(facts: RunFacts, where: PlacedRoles) -> LearnerSpeed:
    """The speed of a critic, by the data sheet."""
    train = critic_train(facts.config.critic, facts.config.train)
    footprint = facts.models[CRITIC].footprint
    if footprint is None:
        raise CostUnknown("critic.path: the model's size is unknown here; type critic.path=null")
    return speed_by_sheet(train, footprint, facts, where, pack_group(facts, shares=False))


def estimate_scorer(role: str, facts: RunFacts, where: PlacedRoles) -> float:
    """The time of a token that a meta-RM or a scalar reward model reads, by the data sheet."""
    footprint = facts.models[role].footprint
    if footprint is None:
        key = role if role == META_RM else facts.config.models[role].key
        raise CostUnknown(f"{key}.path: the model's size is unknown here; give the path of its files")
    return estimate_read_s(footprint.matrix_weights, device_for(where.pool, facts), facts.scorer_dtypes[role])


def push_s(model: str, facts: RunFacts, where: PlacedRoles) -> float:
    """The time of a push of a model's weights from its learner: over the network if the run's slots are more than a
    node has.
    """
    device, pools = device_for(where.pool, facts), facts.placement.pools.values()
    resource = facts.config.placement.pools[where.pool].resource
    num_slots = sum(pool.slots for pool in pools if pool.resource == resource)
    over_nodes = num_slots > device.slots_per_node
    return sync_time_s(measure_push(model, facts, over_nodes=over_nodes), device, over_nodes=over_nodes)


def predict_pause_s(facts: RunFacts) -> float | None:
    """The pause of the policy's engines for a push. None if nothing is pushed, or a size or the device is unknown."""
    if not {LEARNER, POLICY} <= facts.placement.seats.keys() or facts.models[POLICY].footprint is None:
        return None
    where = facts.describe_seats(LEARNER)
    return round(push_s(POLICY, facts, where), 4) if facts.devices[where.pool] is not None else None


def count_cores(facts: RunFacts) -> int:
    """The cores of this machine, unless the configuration sets or needs more."""
    pools = facts.placement.pools.values()
    asked = sum(pool.slots for pool in pools if pool.resource == "cpu")
    return facts.config.plan.cores or max(asked, os.cpu_count() or 1)


def estimate_switch(facts: RunFacts, seated: Mapping[str, PlacedRoles]) -> float:
    """The time of the slowest change of role; the embedded engine keeps both models."""
    dearest = 0.0
    for served in facts.roles.hosts:
        where, footprint = seated[served.name], facts.models[served.name].footprint
        device = facts.devices[where.pool]
        if device is not None and footprint is not None and served.engine.memory.frees_gpu:
            dearest = max(dearest, switch_time_s(engine_weights(served, footprint) / where.width, device))
    return dearest


# -- sizes ---------------------------------------------------------------------------------------------------------


def require_footprint(role: str, facts: RunFacts) -> Footprint:
    footprint = facts.models[role].footprint
    if footprint is None:
        key = facts.roles.served[role].key
        raise CostUnknown(f"{key}.shape: the model's size is unknown; declare it, as in conf/policy/qwen3_8b.yaml")
    return footprint


def measure_sizes(role: str, facts: RunFacts, num_gpus: int) -> ModelSizes:
    footprint, served = require_footprint(role, facts), facts.roles.served[role]
    return ModelSizes(
        num_parameters=footprint.matrix_weights,
        weight_bytes=engine_weights(served, footprint),
        kv_bytes_per_token=footprint.kv_bytes_per_token(served.dtype, num_gpus),
        dtype=served.dtype,
    )


def measure_push(role: str, facts: RunFacts, *, over_nodes: bool = False) -> PushSize:
    """What a push of a role's model sends. Adapters have two tensors for each linear layer, merged ones one."""
    footprint, served = facts.models[role].footprint, facts.roles.served[role]
    size = count_push_bytes(role, facts)
    tensors = joined = 0
    if footprint is not None and served.model.lora.learns:
        tensors = len(footprint.linear_widths) * footprint.num_layers * (2 if served.model.lora.in_engines else 1)
    elif footprint is not None:
        experts = footprint.num_expert_tensors if served.engine.checkpoint_names else 0
        joined = experts if served.engine.joins_experts(served.num_gpus) else 0
        tensors = footprint.num_tensors + experts - joined
    buckets = math.ceil(size / choose_bucket_bytes(served.sync.bucket_mb << 20, size))
    return PushSize(
        num_bytes=size,
        tensors=tensors,
        joined=joined,
        buckets=buckets,
        calls=facts.describe_seats(role).replicas * count_calls(served, facts, buckets, over_nodes=over_nodes),
        delta=served.sync.delta,
    )


def count_calls(role: ServedRole, facts: RunFacts, buckets: int, *, over_nodes: bool) -> int:
    """The driver's calls to one engine in its pause: to pause and resume, and between them to receive broadcasts, or to
    begin, to take each bucket and to commit.
    """
    # A transport that is typed was checked already: learner and engines may share one of the nodes.
    typed = facts.config.sync.transport != "auto"
    transport = resolve_transport(role, facts.config, facts.placement, same_machine=typed or not over_nodes)
    return 2 + (1 if transport_kind(transport).group is not None else 2 + buckets)


def count_push_bytes(role: str, facts: RunFacts) -> float:
    """The bytes of a push: engines round weights themselves, and some need the adapters alone. Of merged adapters only
    the layers that have them: after the first push, the others aren't sent again.
    """
    footprint, served = facts.models[role].footprint, facts.roles.served[role]
    if footprint is None:
        return 0.0
    lora = served.model.lora
    if lora.in_engines:
        return num_adapters(lora, footprint) * BYTES[served.dtype]
    if lora.learns:
        return footprint.count_adapted_weights(lora.target_modules) * BYTES[served.dtype]
    return footprint.weight_bytes(served.dtype)


def device_for(pool: str, facts: RunFacts) -> DeviceSpec:
    device = facts.devices[pool]
    if device is None:
        raise CostUnknown(
            f"placement.pools.{pool}.device: the GPU is unknown; type placement.pools.{pool}.device=h100 (or its name)"
        )
    return device
