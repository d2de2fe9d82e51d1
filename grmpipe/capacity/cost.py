"""The time that work takes: engines, learner, syncs, switches; from data sheets or measured. Pure.

The roofline here is a sum, not a maximum: a decoding step takes the time of its bytes plus the time of its arithmetic.
It is right far from the knee, and at most twice too slow at the knee. In exchange a step is linear in rows and cached
tokens, as EngineSpeed needs. An engine's arithmetic of attention is left out: 7 % for 8 B parameters at 2 k tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from grmpipe.models.lm.footprint import BYTES
from grmpipe.models.types import EngineSpeed
from grmpipe.scheduler.devices import GB, DeviceSpec

LINK_SHARE = 0.7  # share of NVLink, PCIe or the network: NCCL broadcasts, pinned copies
DRIVER_REQUEST_S = 5e-4  # over Ray, for short answers
SYNC_FIXED_S = 0.05  # no push takes less
# What a push takes besides its bytes: a tensor goes through an engine's loader, mostly in Python (1.1 ms for one of an
# expert: vLLM 0.32 for CPUs, a mixture beside a dense model of its size; 0.1 ms if they are joined before); a bucket is
# made, sent and checked (assumed); the driver asks an engine something, over Ray. It scores the probe after its pause.
TENSOR_S, JOINED_S, BUCKET_S, CALL_S = 1e-3, 1e-4, 5e-3, 1.1e-3
# With `sync.delta`, at the rates of RL: the share of the bytes that is sent, about, and the seconds of one of the
# learner's threads to find what changed in a GB (benchmarks/weight_delta.md).
DELTA_SHARE, DELTA_S_PER_GB = 0.01, 1.5
# Nine of ten published rates are within these factors of those estimated for a model that nothing was fitted to
# (benchmarks/plan_rates.md).
LEARNER_SPREAD = 1.5
ENGINE_SPREAD = 1.6

FORWARD_FLOPS = 2  # per parameter and token
GRADIENT_FLOPS = 2  # the backward pass's, for the gradients of a layer's inputs, and again for its weights'
# Per trained parameter, in float32: gradients are scaled (8), their norm is taken (4), they are clipped (8); AdamW
# reads four values and writes three (28).
OPTIMIZER_BYTES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """What an engine reaches of a device's peaks, and its host's time: fitted to published rates of vLLM
    (benchmarks/plan_rates.md).
    """

    bandwidth: float = 0.9  # share of memory bandwidth: weights, keys and values
    flops: float = 0.7  # share of arithmetic: the rows of a decoding step
    prefill_flops: float = 0.5  # the same: prompts (vLLM, Qwen3-14B on an A100: 0.57; docs.gpustack.ai 2.3)
    row_s: float = 5.6e-5  # the host's part of each row of a decoding step: sampling, its new token
    parallel: float = 0.9  # kept per doubling of the GPUs of an engine: two all-reduces a layer wait for the slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRates:
    """What a learner reaches of a device's peaks: fitted to published rates of learners whose models are
    transformers' own modules (benchmarks/plan_rates.md).
    """

    flops: float = 0.7  # share of arithmetic: matrix products of a dense model
    expert_flops: float = 0.31  # the same in a mixture: many small products, and tokens on their way to experts
    attention: float = 0.55  # share of arithmetic: FlashAttention, forward and backward
    # Reads and writes of each activation in memory, for each pass over it: norms, rotations, sums are kernels of their
    # own. They keep small models far from the peak.
    traffic: float = 9.0
    bandwidth: float = 0.9  # share of memory bandwidth: streaming kernels


ENGINE_RATES = EngineRates()
LEARNER_RATES = LearnerRates()


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpeed:
    """The speed of a learner, all ranks together."""

    token_s: float  # forward and backward of one packed token
    step_s: float  # one optimizer step
    forward_share: float = 1 / 3  # share of token_s: a pass without gradients

    @property
    def forward_s(self) -> float:
        """The time of a pass without gradients over one packed token."""
        return self.token_s * self.forward_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a placement's processes, by role."""

    engines: Mapping[str, EngineSpeed]  # role -> speed of one engine
    learner: LearnerSpeed
    sync_s: float  # a push of the policy's weights, with the pause
    switch_s: float = 0.0  # an elastic slot's change of role
    driver_request_s: float = 0.0  # time of the driver process for each request to an engine; these don't overlap
    critic: LearnerSpeed | None = None  # if advantages need one
    scorer_token_s: Mapping[str, float] = field(default_factory=dict)  # by role: a token that a scorer reads
    grm_learners: Mapping[str, LearnerSpeed] = field(default_factory=dict)  # by the learner's role
    grm_sync_s: Mapping[str, float] = field(default_factory=dict)  # a push of each of them
    cores: int = 0  # cores of the processes on CPU slots and of the driver; 0: each slot has its own core


def slower_costs(costs: Costs, learners: float, engines: float) -> Costs:
    """The same costs with times of learners, and of engines and scorers, multiplied by these factors."""
    return replace(
        costs,
        engines={role: slower_engine(speed, engines) for role, speed in costs.engines.items()},
        scorer_token_s={role: token_s * engines for role, token_s in costs.scorer_token_s.items()},
        learner=slower_learner(costs.learner, learners),
        critic=slower_learner(costs.critic, learners) if costs.critic is not None else None,
        grm_learners={role: slower_learner(speed, learners) for role, speed in costs.grm_learners.items()},
    )


def slower_engine(speed: EngineSpeed, factor: float) -> EngineSpeed:
    return replace(
        speed,
        step_s=speed.step_s * factor,
        row_s=speed.row_s * factor,
        cached_token_s=speed.cached_token_s * factor,
        prefill_token_s=speed.prefill_token_s * factor,
    )


def slower_learner(speed: LearnerSpeed, factor: float) -> LearnerSpeed:
    return replace(speed, token_s=speed.token_s * factor, step_s=speed.step_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that decide its speed. Bytes are those of the engine's dtype. `num_parameters`: those that
    multiply a token. `kv_bytes_per_token`: on all GPUs of an engine together.
    """

    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    dtype: str


def engine_speed(
    model: ModelSizes,
    device: DeviceSpec,
    *,
    num_slots: int = 1,
    max_rows: int,
    kv_bytes: float = 0.0,
    rates: EngineRates = ENGINE_RATES,
) -> EngineSpeed:
    """The speed of one engine over `num_slots` devices: prefill by arithmetic, decoding by bytes plus arithmetic per
    row.

    kv_bytes: memory for keys and values on all its devices together; 0: no limit.
    """
    parallel = parallel_gain(num_slots, rates)
    bytes_per_s = device.memory_gb_per_s * GB * rates.bandwidth * parallel
    token_s = FORWARD_FLOPS * model.num_parameters / (device.flops(model.dtype) * parallel)  # at the peak
    return EngineSpeed(
        step_s=device.step_s + model.weight_bytes / bytes_per_s,
        row_s=token_s / rates.flops + rates.row_s,
        cached_token_s=model.kv_bytes_per_token / bytes_per_s,
        prefill_token_s=token_s / rates.prefill_flops,
        max_rows=max_rows,
        kv_tokens=int(kv_bytes / model.kv_bytes_per_token),
    )


def parallel_gain(num_slots: int, rates: EngineRates = ENGINE_RATES) -> float:
    """The speedup of one model over several devices: 1.8 on two, 3.2 on four, 5.8 on eight."""
    gain, left = 1.0, num_slots
    while left >= 2:
        gain, left = gain * 2 * rates.parallel, left // 2
    return gain


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """The operations of a learner's passes over one packed token, attention left out."""

    training: float  # forward and backward
    forward: float  # without gradients

    @property
    def forward_share(self) -> float:
        return self.forward / self.training


def token_flops(num_weights: int, *, num_adapters: int = 0, checkpointing: bool = False) -> TokenFlops:
    """The operations for a token that passes these weights. With adapters only these are trained: frozen weights need
    no gradients. `checkpointing` computes the layers again in the backward pass (ModelFlops leaves that out).
    """
    forward = FORWARD_FLOPS * (num_weights + num_adapters)
    trained = num_adapters or num_weights
    backward = GRADIENT_FLOPS * (num_weights + num_adapters + trained)
    return TokenFlops(training=forward * (2 if checkpointing else 1) + backward, forward=forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerModel:
    """The sizes of a model that decide its learner's speed.

    num_active: parameters that multiply a token; 0: all. num_adapters: parameters of adapters, which are trained
    instead; 0: none. values_per_token: activations of a token in all layers and adapters. attention_flops: operations
    of a forward pass for each token, in attention, at mean lengths.
    """

    num_parameters: int
    num_active: int = 0
    num_adapters: int = 0
    values_per_token: int = 0
    attention_flops: float = 0.0
    is_mixture: bool = False


def learner_speed(
    model: LearnerModel,
    device: DeviceSpec,
    *,
    ranks: int,
    dtype: str,
    checkpointing: bool,
    keeps_attention: bool = False,
    copies: int = 1,
    token_bytes_to_host: float = 0.0,
    step_bytes_to_host: float = 0.0,
    rates: LearnerRates = LEARNER_RATES,
) -> LearnerSpeed:
    """The speed of all ranks together: arithmetic and memory traffic per token, bytes per step. Gathering is assumed
    to be hidden; copies to the host are not, because they run on the stream of the computation.

    checkpointing: layers are computed again in the backward pass, their attention too unless `keeps_attention`.
    copies: how many copies of the model there are, each sharded over an equal part of the ranks. token_bytes_to_host:
    a token's activations that wait there for the backward pass; step_bytes_to_host: the moments of one copy of the
    model. Both come back.
    """
    flops = token_flops(
        model.num_active or model.num_parameters, num_adapters=model.num_adapters, checkpointing=checkpointing
    )
    products = device.flops(dtype) * (rates.expert_flops if model.is_mixture else rates.flops)
    attention_s = model.attention_flops / (device.flops(dtype) * rates.attention)
    bytes_per_s = device.memory_gb_per_s * GB * rates.bandwidth
    pass_s = model.values_per_token * BYTES[dtype] * rates.traffic / bytes_per_s
    again, attended_again = int(checkpointing), int(checkpointing and not keeps_attention)
    forward_s = flops.forward / products + attention_s + pass_s
    training_s = flops.training / products + (3 + attended_again) * attention_s + (3 + again) * pass_s
    host_bytes_per_s = device.host_gb_per_s * GB * LINK_SHARE
    step_bytes = OPTIMIZER_BYTES * (model.num_adapters or model.num_parameters)
    token_s = (training_s + 2 * token_bytes_to_host / host_bytes_per_s) / ranks
    return LearnerSpeed(
        token_s=token_s,
        step_s=(step_bytes / bytes_per_s + 2 * step_bytes_to_host / host_bytes_per_s) / (ranks // copies),
        forward_share=forward_s / ranks / token_s,
    )


def estimate_read_s(num_parameters: int, device: DeviceSpec, dtype: str) -> float:
    """The time of a token that a model with a scalar head reads, in large batches."""
    return FORWARD_FLOPS * num_parameters / (device.flops(dtype) * ENGINE_RATES.prefill_flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSize:
    """What a push sends. joined: tensors that engines join before they load them. calls: those of the driver to all
    engines. delta: only what changed is sent.
    """

    num_bytes: float
    tensors: int = 0
    joined: int = 0
    buckets: int = 0
    calls: int = 0
    delta: bool = False


def sync_time_s(push: PushSize, device: DeviceSpec, *, over_nodes: bool = False) -> float:
    """The pause of a push to all engines at once, over the slowest link: within a node, or the network."""
    rate = device.network_gb_per_s if over_nodes else device.link_gb_per_s
    parts_s = push.tensors * TENSOR_S + push.joined * JOINED_S + push.buckets * BUCKET_S + push.calls * CALL_S
    sent_s = push.num_bytes / (min(rate, device.link_gb_per_s) * GB * LINK_SHARE)
    if push.delta:
        sent_s = DELTA_SHARE * sent_s + DELTA_S_PER_GB * push.num_bytes / GB
    return SYNC_FIXED_S + parts_s + sent_s


def switch_time_s(weight_bytes: float, device: DeviceSpec) -> float:
    """The time to load another model's weights from the machine's memory."""
    return weight_bytes / (device.host_gb_per_s * GB * LINK_SHARE)
