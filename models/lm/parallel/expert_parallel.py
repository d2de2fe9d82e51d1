"""Expert parallelism: the experts of each layer are divided over ranks, and tokens travel to the ranks of their experts
and back.

transformers' own expert parallelism lets every rank hold all tokens and adds up what each computed; here ranks have
different tokens (GShard, arXiv 2006.16668).

T: tokens of this rank, K: experts per token, N: T x K, E: experts of a layer, R: ranks that divide them, L: E / R
experts of a rank, M: tokens that reached this rank, H: hidden units, I: inner units of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from grmpipe.models.lm.parallel.exchange import exchange_rows

EXPERT_PARALLEL = "grmpipe_expert_parallel"  # our name in transformers' table of experts implementations
# By class name, as routers are: those with fused weights gate_up_proj [E, 2I, H] and down_proj [E, H, I].
DIVISIBLE = ("Qwen2MoeExperts", "Qwen3MoeExperts", "OlmoeExperts", "MixtralExperts")
_groups: WeakKeyDictionary[nn.Module, dist.ProcessGroup] = WeakKeyDictionary()


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold the experts of a layer, by transformers' name for all of them; none in a dense model."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):
            yield name, module


def check_divisible(model: PreTrainedModel, ep: int) -> None:
    """Raises ValueError that names `ep` if the experts of this model can't be divided over this number of ranks."""
    kind, found = model.config.model_type, dict(find_experts(model))
    if not found:
        raise ValueError(f"ep: a {kind!r} model has no experts to divide over {ep} ranks; type 1")
    for experts in found.values():
        name, num_experts = type(experts).__name__, _num_experts(experts)
        if name not in DIVISIBLE:
            raise ValueError(
                f"ep: the experts of a {kind!r} model ({name}) can't be divided over ranks; those of "
                f"{', '.join(DIVISIBLE)} can; type 1"
            )
        if num_experts % ep:
            raise ValueError(f"ep: {ep} ranks can't divide {num_experts} experts evenly; type a divisor of them")


def divide_experts(model: PreTrainedModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Divide the experts of each layer over the ranks of `ep`, and shard each rank's experts by FSDP2 over the rest of
    the mesh, in place. Call before layers are sharded. mesh: RankMeshes.experts.

    Gradients are averaged over all ranks, like other gradients.
    """
    check_divisible(model, mesh["ep"].size())
    for _, experts in find_experts(model):
        _divide(experts, mesh["ep"])
        _shard(experts, mesh, policy)
    model.set_experts_implementation(EXPERT_PARALLEL)


def gather_early(layer: nn.Module) -> None:
    """Gather a layer's experts while its attention computes. Call when both are sharded."""
    for _, experts in find_experts(layer):
        assert isinstance(layer, FSDPModule) and isinstance(experts, FSDPModule)
        layer.set_modules_to_forward_prefetch([experts])


def _divide(experts: nn.Module, ep: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        # Without a source rank each rank takes its part of its own tensor.
        divided = distribute_tensor(parameter.detach(), ep, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    _groups[experts] = ep.get_group()


def _shard(experts: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    over = [name for name in mesh.mesh_dim_names or () if name != "ep"]
    shards = mesh["efsdp"].size()
    # Gates keep their type, as without expert parallelism.
    unit = fully_shard(
        experts,
        mesh=mesh[tuple(over)] if len(over) > 1 else mesh[over[0]],
        mp_policy=MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False),
        shard_placement_fn=lambda parameter: Shard(choose_sharded_dimension(parameter.shape, shards)),
    )
    # A gradient is a sum over the tokens of all ranks along ep: FSDP2 would divide it by the other ranks alone.
    unit.set_gradient_divide_factor(float(mesh.size()))
    if shards > 1:  # gloo has no sum with a factor; a single shard is divided without one
        unit.set_force_sum_reduction_for_comms(True)


def choose_sharded_dimension(shape: Sequence[int], shards: int) -> int:
    """The dimension of an expert's weights [E, out, in] that FSDP2 shards: not that of the experts, which other ranks
    hold, and one that it can divide evenly. Raises ValueError that names `ep` if there is none.
    """
    for dimension in (1, 2):
        if shape[dimension] % shards == 0:
            return dimension
    raise ValueError(
        f"ep: {shards} ranks would shard the same experts, and can't divide their weights ({shape[1]} x {shape[2]}) "
        "evenly; type another ep"
    )


def forward_over_ranks(experts: nn.Module, hidden_TH: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """The output of a layer of divided experts, [T, H]. A collective, also for a rank whose tokens need none of the
    others, and so is its backward pass.
    """
    by_expert_N = experts_TK.flatten().argsort(stable=True)  # and so by rank
    dispatch = ExpertDispatch.of(experts_TK, _num_experts(experts), _groups[experts])
    out_NH = _sent_through(experts, hidden_TH[by_expert_N // experts_TK.shape[1]], dispatch)
    out_TKH = out_NH[by_expert_N.argsort()].view(*experts_TK.shape, hidden_TH.shape[1])
    # A product of matrices, because T x K x H products would be held before they are added up; a copy, because FSDP2
    # warns of views.
    return (gates_TK.to(out_TKH.dtype)[:, None] @ out_TKH).squeeze(1).clone()


def _sent_through(experts: Any, rows: Tensor, dispatch: ExpertDispatch) -> Tensor:
    """Rows [N, H], sorted by expert, after their experts. Names are reused, so that no copy outlives its use."""
    rows = exchange_rows(rows, dispatch.group, dispatch.sends, dispatch.receives)
    by_local_M = dispatch.local_experts_M.argsort(stable=True)
    rows = rows[by_local_M]
    rows = experts._apply_gate(_grouped(rows, experts.gate_up_proj, dispatch))
    rows = _grouped(rows, experts.down_proj, dispatch)
    rows = rows[by_local_M.argsort()]
    return exchange_rows(rows, dispatch.group, dispatch.receives, dispatch.sends)


def _grouped(rows: Tensor, weight: Tensor, dispatch: ExpertDispatch) -> Tensor:
    """rows [M, in], sorted by local expert, times each expert's weight [L, out, in]."""
    own = weight.to_local() if isinstance(weight, DTensor) else weight
    if len(rows) == 0:  # kernels may refuse it, and the weight must have a gradient nevertheless
        return rows @ own[0].transpose(-2, -1)
    product: Tensor = grouped_mm(rows, own.transpose(-2, -1), offs=dispatch.ends_L)
    return product


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDispatch:
    """How many tokens of this rank go to each rank, and how many come from each; the local expert of those that come,
    in order of arrival; ends_L: where each local expert's tokens end, sorted by expert.
    """

    group: dist.ProcessGroup
    sends: list[int]
    receives: list[int]
    local_experts_M: Tensor
    ends_L: Tensor

    @staticmethod
    def of(experts_TK: Tensor, num_experts: int, group: dist.ProcessGroup) -> ExpertDispatch:
        chosen_N, num_ranks = experts_TK.flatten(), group.size()
        sent_E = chosen_N.new_zeros(num_experts).scatter_add_(0, chosen_N, torch.ones_like(chosen_N))
        sent_RL = sent_E.view(num_ranks, -1)
        received_RL = torch.empty_like(sent_RL)
        dist.all_to_all_single(received_RL, sent_RL, group=group)
        sends, receives = torch.stack([sent_RL.sum(1), received_RL.sum(1)]).tolist()  # waits for the device, once
        local_L = torch.arange(sent_RL.shape[1], device=chosen_N.device)
        return ExpertDispatch(
            group=group,
            sends=sends,
            receives=receives,
            local_experts_M=local_L.repeat(num_ranks).repeat_interleave(
                received_RL.flatten(), output_size=sum(receives)
            ),
            ends_L=received_RL.sum(0).cumsum(0).to(torch.int32),
        )


def _num_experts(experts: Any) -> int:
    return int(experts.num_experts)


ALL_EXPERTS_FUNCTIONS.register(EXPERT_PARALLEL, forward_over_ranks)
