"""The memory of each process of a run, by what uses it, and the slots that it overfills."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grmpipe.capacity.lower_bound import CRITIC, POLICY, is_learning
from grmpipe.capacity.plan.in_flight import InFlight, count_batch_tokens, longest_rollout, requests_in_flight
from grmpipe.capacity.plan.run_facts import RunFacts, Sized
from grmpipe.config.critic import critic_train
from grmpipe.config.model_training import find_training
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import TrainConfig
from grmpipe.models.engines.engine_memory import LEAST_PACKED
from grmpipe.models.lm.footprint import BYTES, BYTES_OF_ADAM, Footprint, Working
from grmpipe.models.settings import LoraConfig
from grmpipe.models.weights.bucket_size import choose_bucket_bytes
from grmpipe.roles.roles import ServedRole
from grmpipe.scheduler.devices import GB
from grmpipe.scheduler.placement import Placement, PoolConfig, Seat
from grmpipe.train.learner.learner_spec import choose_frozen_dtype

# Assumed for an engine on a GPU: what its largest step computes at once in one layer, and the stream between layers. A
# step of SGLang has 8192 tokens at most, one of vLLM 2048 unless its max_num_batched_tokens is set.
ENGINE_STEP_TOKENS = 8192
STREAMS = 3  # tensors of the hidden size: the residual, a layer's input, its output
LOGIT_COPIES = 3  # in float32: as computed, scaled, sorted or normalised
GRAPH_BYTES = 1 * GB  # CUDA graphs, NCCL's buffers
# The embedded engine's, for each row: logits, the same in float32, their log-probs, probabilities, and these summed in
# float64 (sampling.py).
BYTES_OF_SAMPLED_LOGIT = 4 + 4 + 4 + 4 + 8
CERTAIN = ("weights", "state", "moments")  # kinds of use that no length changes
PROCESS_BYTES = 0.35 * GB  # a process on cores before it has a model (benchmarks/process_memory.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """A use of a process's memory."""

    what: str
    num_bytes: float
    # state: gradients, a reference; moments: the optimizer's
    kind: Literal["weights", "state", "moments", "kv", "other"] = "other"


def list_memory(facts: RunFacts, role: str) -> list[MemoryUse]:
    """The uses of one process of a role on each of its slots, at most. Empty if the model's size is unknown."""
    seated, pool = facts.describe_seats(role), facts.pool(role)
    own = process_memory(facts, pool)
    trained = {learner: model for model, learner in facts.config.learners.items()}
    sized = facts.models.get(trained.get(role, role))
    if sized is None or sized.footprint is None:
        return []
    if role in trained or role == CRITIC:
        if role == CRITIC:
            num_values, held = sized.footprint.num_parameters, critic_memory(facts, sized.footprint, seated.replicas)
        else:
            model, batch_tokens = trained[role], count_batch_tokens(trained[role], facts)
            num_values = sized.footprint.count_trained(facts.config.models[model].lora)
            held = learner_memory(facts.config, sized.footprint, seated.replicas, model, batch_tokens)
        return [
            *held,
            *([] if role == CRITIC else buckets_of_weights(facts.roles.served[trained[role]], sized.footprint, pool)),
            *copies_to_files(facts.config.train, num_values // seated.replicas, sized.footprint, held, pool),
            *own,
        ]
    if (dtype := facts.scorer_dtypes.get(role)) is not None:  # its batches have no gradients, and are small
        return [MemoryUse(what="weights", num_bytes=sized.footprint.weight_bytes(dtype), kind="weights"), *own]
    num_gpus = seated.width if pool.resource == "gpu" else 1
    served = facts.roles.served[role]
    at_once = requests_in_flight(role, facts) if served.engine.memory.grows_cache else None
    return [*engine_memory(served, sized, sized.footprint, num_gpus, pool, at_once), *own]


def buckets_of_weights(served: ServedRole, footprint: Footprint, pool: PoolConfig) -> list[MemoryUse]:
    """The two buckets of a push that a learner's rank has on its GPU at most, for transports between GPUs. Engines take
    them outside of their share of the memory.
    """
    if pool.resource != "gpu" or served.model.lora.in_engines:
        return []
    size = choose_bucket_bytes(served.sync.bucket_mb << 20, footprint.weight_bytes(served.dtype))
    return [MemoryUse(what="two buckets of weights for engines", num_bytes=2 * size)]


def experts_on_their_way(role: ServedRole, footprint: Footprint, num_gpus: int, pool: PoolConfig) -> list[MemoryUse]:
    """What each GPU of an engine that loads the experts of a layer at once holds of them in a push, whole, while they
    come in several buckets: those of up and gate, and the begin of those of down.
    """
    engine, layer = role.engine, footprint.num_expert_parameters / footprint.num_layers * BYTES[role.dtype]
    bucket = choose_bucket_bytes(role.sync.bucket_mb << 20, footprint.weight_bytes(role.dtype))
    sends_experts = role.takes_weights and not role.model.lora.learns and engine.joins_experts(num_gpus)
    if pool.resource != "gpu" or not sends_experts or layer * 2 / 3 <= bucket:
        return []
    return [MemoryUse(what="a layer's experts that wait for the others, in a push", num_bytes=layer)]


def process_memory(facts: RunFacts, pool: PoolConfig) -> list[MemoryUse]:
    """What a process on cores takes without its model. In one process all roles share it: the driver's."""
    if pool.resource != "cpu" or facts.config.cluster.kind == "inprocess":
        return []
    return [MemoryUse(what="Python and libraries", num_bytes=PROCESS_BYTES)]


def engine_memory(
    role: ServedRole,
    sized: Sized,
    footprint: Footprint,
    num_gpus: int,
    pool: PoolConfig,
    at_once: InFlight | None = None,
) -> list[MemoryUse]:
    """The uses on each GPU of an engine that several GPUs share. at_once: its requests, where its cache grows with
    them.
    """
    engine, options = role.engine, role.model
    if engine.joined:
        return [MemoryUse(what="a client; the server runs separately", num_bytes=0.0)]
    shared = f", over {num_gpus} GPUs" if num_gpus > 1 else ""
    weights = engine_weights(role, footprint) / num_gpus
    held = [MemoryUse(what=f"weights{shared}", num_bytes=weights, kind="weights")]
    if role.adapters:
        values = sum(footprint.adapter_parameters(lora.rank, lora.target_modules) for lora in role.adapters.values())
        of = f" of {', '.join(role.adapters)}" if role.is_shared else ""
        held.append(MemoryUse(what=f"adapters{of}", num_bytes=values * BYTES[options.dtype], kind="weights"))
    largest = 4 * footprint.hidden_size * footprint.intermediate_size  # the bytes of one matrix
    if pool.resource == "cpu" and role.dtype == "float32" and largest >= LEAST_PACKED and engine.memory.most_packed:
        packed = min(weights, engine.memory.most_packed)
        held.append(MemoryUse(what="weights once more, arranged for products", num_bytes=packed, kind="weights"))
    if at_once is not None:
        return [*held, *list_growing_cache(role, sized, footprint, pool, at_once)]
    if (own := own_bytes(role, footprint, num_gpus, pool)) > 0:
        held.append(MemoryUse(what="activations, CUDA graphs", num_bytes=own))
    held += experts_on_their_way(role, footprint, num_gpus, pool)
    room = kv_room(role, footprint, num_gpus, pool)
    if room is None:
        return held
    tokens = int(room.num_bytes * num_gpus / footprint.kv_bytes_per_token(options.dtype, num_gpus))
    return [*held, replace(room, what=f"{room.what}: {tokens} tokens")]


def list_growing_cache(
    role: ServedRole, sized: Sized, footprint: Footprint, pool: PoolConfig, at_once: InFlight
) -> list[MemoryUse]:
    """Keys and values that grow with the requests, by copying: for a moment the old and the new ones are held. Room is
    made for twice as many rows or tokens, which on a CPU takes no memory until they come (KvSlots). And what the
    largest step computes in one layer, or the logits of all rows.
    """
    rows, tokens = at_once.requests, at_once.tokens
    cached = rows * tokens
    most_rows, most_tokens = role.engine.max_rows, sized.context_tokens or 2 * tokens
    room = cached if pool.resource == "cpu" else min(2 * rows, most_rows) * min(2 * tokens, most_tokens)
    kv = (cached + room) * footprint.kv_bytes_per_token(role.dtype)
    step_tokens = min(cached, max(ENGINE_STEP_TOKENS, tokens))
    in_layer = step_tokens * layer_values(footprint) * BYTES[role.dtype]
    sampled = rows * footprint.vocab_size * BYTES_OF_SAMPLED_LOGIT
    return [
        MemoryUse(what=f"KV of {rows} rows x {tokens} tokens, twice during growth", num_bytes=kv, kind="kv"),
        MemoryUse(what="activations of a step", num_bytes=max(in_layer, sampled)),
    ]


def layer_values(footprint: Footprint, num_gpus: int = 1) -> float:
    """Values of a token in one layer without gradients, and in the stream between layers."""
    values = 3 * footprint.intermediate_size + footprint.query_width + 2 * footprint.kv_width
    return values / num_gpus + STREAMS * footprint.hidden_size


def engine_weights(role: ServedRole, footprint: Footprint) -> int:
    """The bytes of the weights that an engine of this role holds, on all its GPUs together."""
    return footprint.weight_bytes(role.dtype, role.engine.memory.bytes_in_layers)


def kv_room(role: ServedRole, footprint: Footprint, num_gpus: int, pool: PoolConfig) -> MemoryUse | None:
    """Memory that an engine reserves for keys and values on each of its devices. None if that depends on the device's
    memory.
    """
    device, device_bytes = ("cpu", None) if pool.resource == "cpu" else ("cuda", pool.memory_gb and pool.memory_gb * GB)
    held = engine_weights(role, footprint) / num_gpus
    if role.engine.memory.share_has_activations:
        held += own_bytes(role, footprint, num_gpus, pool)
    room = role.engine.memory.cache_room(held, device, device_bytes)
    return MemoryUse(what=f"KV, {room.decided_by}", num_bytes=room.num_bytes, kind="kv") if room is not None else None


def own_bytes(role: ServedRole, footprint: Footprint, num_gpus: int, pool: PoolConfig) -> float:
    """The memory of an engine on each GPU beside weights, keys and values: the activations of its largest step, the
    logits of all rows, CUDA graphs. 0 on a CPU, where it is small.
    """
    if pool.resource == "cpu":
        return 0.0
    logits = LOGIT_COPIES * role.engine.max_rows * footprint.vocab_size * 4
    return ENGINE_STEP_TOKENS * layer_values(footprint, num_gpus) * BYTES[role.dtype] + logits + GRAPH_BYTES


def learner_memory(
    config: RunConfig, footprint: Footprint, ranks: int, model: str = POLICY, batch_tokens: int | None = None
) -> list[MemoryUse]:
    """The uses of one rank of the learner of a served model. batch_tokens: most in a whole batch; None: unknown."""
    lora, training = config.models[model].lora, find_training(config, model)
    train = with_room_for(training.max_new_tokens, training.train, batch_tokens)
    shards = ranks // train.parallel.dp_replicate
    working = estimate_working(train, footprint, shards, frozen=lora.learns)
    held = (
        adapter_state(lora, train, footprint)
        if lora.learns
        else whole_state(train, footprint, has_reference=training.algorithm.kl_coefficient > 0)
    )
    return _rank_memory(held, shards, working, train)


def with_room_for(answer_tokens: int, train: TrainConfig, batch_tokens: int | None = None) -> TrainConfig:
    """The same settings with micro-batches that hold the longest answer, and no more than the batch: a sample isn't
    divided but over the ranks that share it.
    """
    own = -(-answer_tokens // train.parallel.cp)
    tokens = max(train.micro_batch_tokens, own)
    return replace(train, micro_batch_tokens=tokens if batch_tokens is None else min(tokens, batch_tokens))


def copies_to_files(
    train: TrainConfig, num_values: int, footprint: Footprint, held: Sequence[MemoryUse], pool: PoolConfig
) -> list[MemoryUse]:
    """What a rank on cores copies to write it: its trained values and their moments, with `train.async_checkpoints`
    while it trains on; the whole model, for the export at the end, when activations are gone. A rank on a GPU has these
    in the memory of its machine.
    """
    if pool.resource != "cpu":
        return []
    copied = num_values * (4 + BYTES_OF_ADAM) if train.async_checkpoints else 0
    at_end = max(copied, footprint.weight_bytes("float32")) - total(use for use in held if use.kind == "other")
    in_between = copied if 0 < train.checkpoint_every < train.num_steps else 0
    return [MemoryUse(what="copies for checkpoints, export", num_bytes=max(0.0, at_end, in_between))]


def _rank_memory(held: Sequence[MemoryUse], shards: int, working: Working, train: TrainConfig) -> list[MemoryUse]:
    """The uses of one rank, from the state of all of them together. Offloaded moments are on the device when
    activations aren't, so only what they need beyond these counts.
    """
    shared = f", over {shards} ranks" if shards > 1 else ""
    uses = [replace(use, what=f"{use.what}{shared}", num_bytes=use.num_bytes // shards) for use in held]
    if train.optimizer.offload:
        uses = [
            replace(
                use,
                what=f"{use.what}, beyond activations, with which they alternate",
                num_bytes=max(0, use.num_bytes - working.total),
            )
            if use.kind == "moments"
            else use
            for use in uses
        ]
    return [
        *uses,
        MemoryUse(what="gathered layers", num_bytes=working.gathered),
        MemoryUse(what=f"activations of {train.micro_batch_tokens} tokens", num_bytes=working.activations),
    ]


def estimate_working(train: TrainConfig, footprint: Footprint, shards: int, *, frozen: bool = False) -> Working:
    """The memory of a forward and backward pass on a full micro-batch."""
    return footprint.estimate_working_bytes(
        train.dtype, train.micro_batch_tokens, train.activations, ranks=shards, ep=train.parallel.ep, frozen=frozen
    )


def _moments(whose: str, num_values: int) -> MemoryUse:
    """Both moments of this number of trained values, on all ranks together."""
    return MemoryUse(what=f"{whose}, two moments", num_bytes=BYTES_OF_ADAM * num_values, kind="moments")


def whole_state(train: TrainConfig, footprint: Footprint, *, has_reference: bool = False) -> list[MemoryUse]:
    """The state of all ranks together if all weights are trained."""
    copy, frozen = footprint.shard_bytes(1), footprint.weight_bytes(choose_frozen_dtype(train.dtype))
    reference = [MemoryUse(what="weights of the reference", num_bytes=frozen, kind="state")]
    return [
        MemoryUse(what="weights", num_bytes=copy, kind="weights"),
        MemoryUse(what="gradients", num_bytes=copy, kind="state"),
        _moments("optimizer", footprint.num_parameters),
        *(reference if has_reference else []),
    ]


def adapter_state(lora: LoraConfig, train: TrainConfig, footprint: Footprint) -> list[MemoryUse]:
    """The state of all ranks together if adapters are trained (in float32). Without them the weights are the
    reference.
    """
    num_values = footprint.adapter_parameters(lora.rank, lora.target_modules)
    copy = 4 * num_values
    return [
        MemoryUse(
            what="weights, frozen", num_bytes=footprint.weight_bytes(choose_frozen_dtype(train.dtype)), kind="weights"
        ),
        MemoryUse(what="adapters", num_bytes=copy, kind="weights"),
        MemoryUse(what="gradients of the adapters", num_bytes=copy, kind="state"),
        _moments("optimizer of the adapters", num_values),
    ]


def critic_memory(facts: RunFacts, footprint: Footprint, ranks: int) -> list[MemoryUse]:
    """The uses of a critic: those of a learner without a reference."""
    config = facts.config
    batch_tokens = longest_rollout(facts).batch_tokens(
        config.train.groups_per_batch, config.train.group_size, shares=False
    )
    train = with_room_for(config.rollout.max_new_tokens, critic_train(config.critic, config.train), batch_tokens)
    shards = ranks // train.parallel.dp_replicate
    return _rank_memory(whole_state(train, footprint), shards, estimate_working(train, footprint, shards), train)


def total(uses: Iterable[MemoryUse]) -> float:
    return sum(use.num_bytes for use in uses)


def memory(uses: Mapping[str, list[MemoryUse]]) -> str:
    """A block of text with every role's uses."""
    wide = column_width(uses)
    lines = ["memory per process, on each of its slots: estimated peak"]
    for role, held in uses.items():
        if not held:
            lines.append(f"  {role:<{wide}} unknown")
            continue
        lines.append(f"  {role:<{wide}} {size(total(held))}")
        lines += [f"  {'':<{wide}} {size(use.num_bytes):>8}  {use.what}" for use in held]
    return "\n".join(lines)


def column_width(roles: Iterable[str]) -> int:
    """The width of a column of roles, or of judges."""
    return max(8, *map(len, roles))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMemory:
    """The memory of one slot's processes: the most that they hold at any time."""

    pool: str
    slot: int
    seats: tuple[Seat, ...]
    held: float
    memory_gb: float | None

    @property
    def is_overfull(self) -> bool:
        return self.memory_gb is not None and self.memory_gb > 0 and self.held > self.memory_gb * GB


def memory_of_slots(facts: RunFacts, uses: Mapping[str, list[MemoryUse]]) -> Iterator[SlotMemory]:
    for name, pool in facts.placement.pools.items():
        for slot in range(pool.slots):
            here = tuple(seat for seat in everybody(facts.placement) if seat.pool == name and slot in seat.slots)
            held = sum_held_memory(facts, name, here, uses)
            yield SlotMemory(pool=name, slot=slot, seats=here, held=held, memory_gb=pool.memory_gb)


def slot_memory(facts: RunFacts, uses: Mapping[str, list[MemoryUse]]) -> str:
    """A block of text with the memory of each slot's processes. Equal slots are listed once."""
    lines: dict[tuple[str, str], list[str]] = {}
    for one in memory_of_slots(facts, uses):
        held = size(one.held) if all(uses[seat.role] for seat in one.seats) else "unknown"
        limit = f" of {one.memory_gb:g} GB" if one.memory_gb else ""
        roles = (" + ".join(seat.role for seat in one.seats) or "no role") + by_turns(facts, one.pool)
        lines.setdefault((one.pool, f"{held}{limit}  {roles}"), []).append(str(one.slot))
    rows = [(f"{pool} {format_slots(slots)}", text) for (pool, text), slots in lines.items()]
    wide = max(len(where) for where, _ in rows)
    return "\n".join(["memory per slot", *(f"  {where:<{wide}}  {text}" for where, text in rows)])


def sum_held_memory(facts: RunFacts, pool: str, here: Sequence[Seat], uses: Mapping[str, list[MemoryUse]]) -> float:
    """The most memory that a slot's processes hold at any time: sleeping ones and those waiting on the host hold
    less.
    """
    placement = facts.placement
    whole = {seat.role: total(uses[seat.role]) for seat in here}
    sharing = [role for role in placement.time_sharing_roles if role in whole]
    if "learner" in whole and sharing:
        kept = {role: kept_asleep(facts, role, uses[role]) for role in sharing}
        on_gpu = placement.pools[pool].resource == "gpu"
        weights = total(use for use in uses["learner"] if use.kind == "weights")
        at_push, between = (weights, 0.0) if on_gpu else (whole["learner"],) * 2
        policy = {"policy": whole["policy"]} if "policy" in sharing else {}
        return max(
            whole["learner"] + sum(kept.values()),
            at_push + sum((kept | policy).values()),
            between + sum(whole[role] for role in sharing),
        )
    served = [role for role in placement.served if role in whole]
    if placement.elastic_slots(pool) and one_at_a_time(facts, served):
        return sum(whole.values()) - sum(whole[role] for role in served) + max(whole[role] for role in served)
    return sum(whole.values())


def kept_asleep(facts: RunFacts, role: str, uses: Sequence[MemoryUse]) -> float:
    """The memory that a sleeping engine keeps: none on a GPU; on a CPU all except what the embedded engine can free."""
    served = facts.roles.served[role]
    if served.device == "cuda":
        return 0.0
    lent = "kv" if served.sleeps else ""
    return total(use for use in uses if use.kind != lent)


def by_turns(facts: RunFacts, pool: str) -> str:
    """How roles share a slot without holding their memory at the same time."""
    if facts.placement.pools[pool].time_shared:
        return ", the learner alternates with the engines"
    served = facts.placement.served
    return ", the engines alternate" if facts.placement.elastic_slots(pool) and one_at_a_time(facts, served) else ""


def one_at_a_time(facts: RunFacts, served: Collection[str]) -> bool:
    """Whether an elastic slot holds the memory of only one role's engine at a time."""
    return all(facts.roles.served[name].frees_device for name in served)


def everybody(placement: Placement) -> list[Seat]:
    return [seat for seats in placement.seats.values() for seat in seats]


def format_slots(slots: list[str]) -> str:
    return slots[0] if len(slots) == 1 else f"{slots[0]}..{slots[-1]}"


def overfull_slots(facts: RunFacts, uses: Mapping[str, list[MemoryUse]]) -> list[str]:
    """Slots whose processes need more than the pool's `memory_gb`."""
    return [
        f"{one.pool} {one.slot}: {', '.join(seat.name for seat in one.seats)} may need {size(one.held)} of "
        f"{one.memory_gb:g} GB (placement.pools.{one.pool}.memory_gb); "
        f"{remedy({seat.role for seat in one.seats}, facts)}"
        for one in memory_of_slots(facts, uses)
        if one.is_overfull
    ]


def remedy(roles: set[str], facts: RunFacts) -> str:
    if len(roles) > 1:
        return "give the roles separate pools"
    (role,) = roles
    if role == CRITIC:
        return f"lower train.micro_batch_tokens, {_smaller(facts.config.train)}or add critic ranks"
    if is_learning(role):
        return f"lower train.micro_batch_tokens, {_smaller(facts.config.train)}or add {role} ranks"
    if role not in facts.roles.served:
        return f"give {role} a separate pool"
    return facts.roles.served[role].engine.memory.remedy


def _smaller(train: TrainConfig) -> str:
    """What to type for a learner that needs less memory, as far as it isn't set already."""
    unset = [
        *(["train.activation_checkpointing=full"] if not train.activations.recomputes else []),
        *(["train.activation_offload=true"] if not train.activation_offload else []),
        *(["train.optimizer.offload=true"] if not train.optimizer.offload else []),
    ]
    return f"type {' '.join(unset)}, " if unset else ""


def size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
