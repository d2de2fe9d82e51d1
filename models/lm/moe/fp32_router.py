"""Routers of a mixture that compute in float32 while the rest is bfloat16, so that fewer near-ties fall the other
way (Megatron's moe_router_dtype=fp32; the Switch Transformer's selective precision, arXiv 2101.03961).
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grmpipe.models.lm.moe.expert_routing import find_routers
from grmpipe.models.lm.parallel.expert_parallel import find_experts
from grmpipe.models.settings import ROUTER

FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)  # inputs are cast too


def route_in_float32(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the routers alone, with weights that aren't rounded. Call before layers are sharded. mesh: the layers'."""
    for router in find_routers(model).values():
        fully_shard(router, mesh=mesh, mp_policy=FLOAT32)
    for _, experts in find_experts(model):
        experts.register_forward_pre_hook(_gates_like_tokens)


def check_has_routers(model: nn.Module) -> None:
    """Raises ValueError that names `fp32_modules` for a model without routers."""
    if not find_routers(model):
        raise ValueError(f"fp32_modules: {type(model).__name__} has no router of a known kind; leave {ROUTER} out")


def _gates_like_tokens(experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Gates in float32 would make each expert's output float32."""
    hidden_TH, experts_TK, gates_TK = inputs
    return hidden_TH, experts_TK, gates_TK.to(hidden_TH.dtype)
