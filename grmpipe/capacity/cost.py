"""The time that work takes: engines, learner, syncs, switches; from data sheets or measured. Pure.

The roofline here is a sum, not a maximum: a decoding step takes the time of its bytes plus the time of its arithmetic.
It is right far from the knee, and at most twice too slow at the knee. In exchange a step is linear in rows and cached
tokens, as EngineSpeed needs. The arithmetic of attention is left out: 7 % for 8 B parameters at 2 k tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from models.types import EngineSpeed
from scheduler.devices import GB, DeviceSpec

# Shares of the peaks, as published for kernels in use; a profile of a run replaces all of them.
BANDWIDTH_SHARE = 0.8  # of memory bandwidth: what streaming kernels reach on HBM
PREFILL_FLOPS_SHARE = 0.5  # large matrix products in an engine
DECODE_FLOPS_SHARE = 0.5  # the same products with few rows; with too few of them, bytes decide anyway
LEARNER_FLOPS_SHARE = 0.4  # MFU of FSDP2 on dense models of 8 to 70 B (torchtitan, arXiv 2410.06511): 0.34 to 0.46
LINK_SHARE = 0.7  # of NVLink or PCIe: NCCL broadcasts, pinned copies
TENSOR_PARALLEL_SHARE = 0.9  # kept per doubling: two all-reduces a layer wait for the slowest
DRIVER_REQUEST_S = 5e-4  # over Ray, for short answers (benchmarks/simulator.md); a profile replaces it
SYNC_FIXED_S = 0.05  # pause, buckets, commit, probe: no push takes less

FORWARD_FLOPS = 2  # per parameter and token
GRADIENT_FLOPS = 2  # of the backward pass, for the gradients of a layer's inputs, and again for those of its weights
# Per trained parameter, in float32: gradients are scaled (8), their norm is taken (4), they are clipped (8); AdamW
# reads four values and writes three (28).
OPTIMIZER_BYTES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpeed:
    """The speed of a learner, all ranks together."""

    token_s: float  # forward and backward of one packed token
    step_s: float  # one optimizer step
    forward_share: float = 1 / 3  # of token_s: a pass without gradients

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
    grm_learners: Mapping[str, LearnerSpeed] = field(default_factory=dict)  # of judging models, by the learner's role
    grm_sync_s: Mapping[str, float] = field(default_factory=dict)  # a push of each of them
    cores: int = 0  # cores of the processes on CPU slots and of the driver; 0: each slot has its own core


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that decide its speed. Bytes are those of the engine's dtype. `num_active_parameters`: those
    that a token passes; 0: all, in a dense model.
    """

    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    dtype: str
    num_active_parameters: int = 0

    @property
    def multiplied(self) -> int:
        """The parameters that each token is multiplied with."""
        return self.num_active_parameters or self.num_parameters


def engine_speed(
    model: ModelSizes, device: DeviceSpec, *, num_slots: int = 1, max_rows: int, kv_bytes: float = 0.0
) -> EngineSpeed:
    """The speed of one engine over `num_slots` devices: prefill by arithmetic, decoding by bytes plus arithmetic per
    row.

    kv_bytes: memory for keys and values on all its devices together; 0: no limit.
    """
    parallel = parallel_gain(num_slots)
    bytes_per_s = device.memory_gb_per_s * GB * BANDWIDTH_SHARE * parallel
    flops = device.flops(model.dtype) * parallel
    token_flops = FORWARD_FLOPS * model.multiplied
    return EngineSpeed(
        step_s=device.step_s + model.weight_bytes / bytes_per_s,
        row_s=token_flops / (flops * DECODE_FLOPS_SHARE),
        cached_token_s=model.kv_bytes_per_token / bytes_per_s,
        prefill_token_s=token_flops / (flops * PREFILL_FLOPS_SHARE),
        max_rows=max_rows,
        kv_tokens=int(kv_bytes / model.kv_bytes_per_token),
    )


def parallel_gain(num_slots: int) -> float:
    """The speedup of one model over several devices: 1.8 on two, 3.2 on four, 5.8 on eight."""
    gain, left = 1.0, num_slots
    while left >= 2:
        gain, left = gain * 2 * TENSOR_PARALLEL_SHARE, left // 2
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


def learner_speed(
    num_parameters: int,
    device: DeviceSpec,
    *,
    ranks: int,
    dtype: str,
    checkpointing: bool,
    num_active: int = 0,
    num_adapters: int = 0,
    copies: int = 1,
    token_bytes_to_host: float = 0.0,
    step_bytes_to_host: float = 0.0,
) -> LearnerSpeed:
    """The speed of all ranks together: arithmetic per token, bytes per step. Gathering is assumed to be hidden; copies
    to the host are not, because they run on the stream of the computation.

    num_active: parameters that a token passes; 0: all. num_adapters: parameters of adapters, which are trained instead;
    0: none. copies: of the model, each sharded over an equal part of the ranks. token_bytes_to_host: of a token's
    activations that wait there for the backward pass; step_bytes_to_host: of the moments of one copy of the model.
    Both come back.
    """
    flops = token_flops(num_active or num_parameters, num_adapters=num_adapters, checkpointing=checkpointing)
    flops_per_s = ranks * device.flops(dtype) * LEARNER_FLOPS_SHARE
    bytes_per_s = device.memory_gb_per_s * GB * BANDWIDTH_SHARE
    host_bytes_per_s = device.host_gb_per_s * GB * LINK_SHARE
    step_bytes = OPTIMIZER_BYTES * (num_adapters or num_parameters)
    token_s = flops.training / flops_per_s + 2 * token_bytes_to_host / (ranks * host_bytes_per_s)
    return LearnerSpeed(
        token_s=token_s,
        step_s=(step_bytes / bytes_per_s + 2 * step_bytes_to_host / host_bytes_per_s) / (ranks // copies),
        forward_share=flops.forward / flops_per_s / token_s,
    )


def reading_s(num_parameters: int, device: DeviceSpec, dtype: str) -> float:
    """The time of a token that a model with a scalar head reads, in large batches."""
    return FORWARD_FLOPS * num_parameters / (device.flops(dtype) * PREFILL_FLOPS_SHARE)


def sync_time_s(weight_bytes: float, device: DeviceSpec) -> float:
    """The time of a push to all engines at once, over the slowest link."""
    return SYNC_FIXED_S + weight_bytes / (device.link_gb_per_s * GB * LINK_SHARE)


def switch_time_s(weight_bytes: float, device: DeviceSpec) -> float:
    """The time to load another model's weights from the machine's memory."""
    return weight_bytes / (device.host_gb_per_s * GB * LINK_SHARE)
