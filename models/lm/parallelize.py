"""One model on several ranks: FSDP2 and its precision; what layers keep from forward to backward."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import varlen  # noqa: F401  registers its operator
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grmpipe.models.lm.causal_lm import load_causal_lm, outline_causal_lm
from grmpipe.models.lm.moe.expert_routing import find_routers
from grmpipe.models.lm.moe.fp32_router import route_in_float32
from grmpipe.models.lm.parallel.expert_parallel import divide_experts, find_experts, gather_early
from grmpipe.models.lm.parallel.ranks import RankMeshes
from grmpipe.models.lm.scalar_head import HEAD, outline_scalar_head, start_scalar_head
from grmpipe.models.settings import KEEP_ALL, Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a model is loaded: whole, and as an outline without numbers. Both functions take (path, dtype).

    exact: submodules that always compute in float32. fp32_router: so do the routers of a mixture.
    """

    load: Callable[[str, str], PreTrainedModel]
    outline: Callable[[str, str], PreTrainedModel]
    exact: tuple[str, ...] = ()
    fp32_router: bool = False


CAUSAL_LM = Architecture(load=load_causal_lm, outline=outline_causal_lm)
SCALAR_HEAD = Architecture(load=start_scalar_head, outline=outline_scalar_head, exact=(HEAD,))


def load_parallel(
    path: str,
    meshes: RankMeshes,
    device: torch.device,
    master_dtype: str,
    dtype: str,
    activations: Activations = KEEP_ALL,
    architecture: Architecture = CAUSAL_LM,
) -> PreTrainedModel:
    """Load a sharded model. Only rank 0 reads the weights, into host memory; no other rank ever holds more than its
    shards.

    A collective. Parameters are kept in `master_dtype`; compute happens in `dtype`.
    """
    whole = architecture.load(path, master_dtype) if dist.get_rank() == 0 else None
    model = architecture.outline(path, master_dtype)
    if architecture.fp32_router:
        route_in_float32(model, meshes.shards)
    parallelize(model, meshes, dtype, activations, architecture.exact)
    model.to_empty(device=device)
    set_model_state_dict(
        model,
        whole.state_dict() if whole else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    # No state dict has the rotary frequencies, and to_empty left them at 0: wrong logits, and no error.
    read = dict(whole.named_buffers()) if whole else {}
    for name, buffer in model.named_buffers():
        if name in read:
            buffer.copy_(read[name])
        dist.broadcast(buffer, src=0)
    return model


def parallelize(
    model: PreTrainedModel,
    meshes: RankMeshes,
    dtype: str,
    activations: Activations = KEEP_ALL,
    exact: Sequence[str] = (),
) -> None:
    """Shard each layer, then embedding and head, then the root, in place. Parameters keep their type; computation is in
    `dtype`, and in float32 within the submodules in `exact`.

    Gradients are averaged over ranks, in float32 where compute is in bfloat16.
    """
    checkpoint_layers(model, decoder_layers(model), activations)
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if meshes.experts is not None:
        divide_experts(model, meshes.experts, policy)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=meshes.shards, mp_policy=policy)
        if meshes.experts is not None:
            gather_early(layer)
    for name in exact:
        fully_shard(model.get_submodule(name), mesh=meshes.shards)
    for end in _untied_ends(model):
        fully_shard(end, mesh=meshes.shards, mp_policy=policy)
    fully_shard(model, mesh=meshes.shards, mp_policy=policy)


def _untied_ends(model: PreTrainedModel) -> list[nn.Embedding | nn.Linear]:
    """The embedding and the output head, if each has weights of its own: then neither is gathered longer than it is
    used. Tied ones stay with the root, which is gathered all the time.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [end for end in (embedding, head) if isinstance(end, (nn.Embedding, nn.Linear))]
    return ends if len({id(end.weight) for end in ends}) == len(ends) else []


@contextmanager
def without_gradient(model: nn.Module) -> Iterator[None]:
    """Context for forward passes without backward.

    Such a pass leaves the root gathered, and the next one would reuse it, even after an optimizer step: a stale
    embedding and head without any error. So the root is resharded here.
    """
    with torch.no_grad():
        yield
    assert isinstance(model, FSDPModule)
    model.reshard()


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The repeated blocks of a transformers model, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


# The operators of attention: the only ones of a layer whose cost grows with the square of a sample's length.
ATTENTION = [
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def checkpoint_layers(
    model: PreTrainedModel, layers: Sequence[GradientCheckpointingLayer], activations: Activations
) -> None:
    """Have these layers of the model keep what `activations` says, in place."""
    for layer in layers:
        # transformers recomputes only in training mode. The flag is set only on the block: dropout below it stays off.
        layer.training = activations.recomputes
    if not activations.recomputes:
        return
    options: dict[str, object] = {"use_reentrant": False}
    if activations.checkpointing == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, ATTENTION)
    model.gradient_checkpointing_enable(options)
    if activations.offload:
        run = functools.partial(_with_inputs_on_host, functools.partial(checkpoint, **options))  # type: ignore[arg-type]
        for layer in layers:
            layer._gradient_checkpointing_func = run  # type: ignore[assignment]  # as transformers sets it


def compile_layers(model: nn.Module, device: torch.device, backend: str = "inductor") -> str:
    """Compile the parts of each layer in place: its norms, its attention with projections and rotation, its MLP.
    Returns what isn't compiled and why; empty: all of them are. `backend`: torch.compile's.

    By `module.compile()`, as torchtitan 0.3.0 does with whole blocks (torchtitan/distributed/compile.py): names of
    parameters stay. Parts and not blocks, because hooks of FSDP2 and of checkpointing stand on the block, and run as
    they are. For any number of tokens: each micro-batch has another.
    """
    if why := _refuse_to_compile(device, backend):
        return f"nothing is compiled: {why}"
    left_out = 0
    for layer in decoder_layers(model):
        for part in layer.children():
            if find_routers(part) or any(find_experts(part)):
                left_out += 1
            else:
                part.compile(dynamic=True, backend=backend)
    if left_out:
        return f"the experts of {left_out} layers aren't compiled: which tokens each gets is known in the pass alone"
    return ""


def _refuse_to_compile(device: torch.device, backend: str) -> str:
    """Why torch can't compile on this machine, by an attempt; empty if it can."""
    try:
        torch.compile(torch.square, dynamic=True, backend=backend)(torch.ones(4, device=device))
    except RuntimeError as error:  # no compiler, none for this device, or a folder of its own that it can't write
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ""


def _with_inputs_on_host(run: Callable[..., object], layer: Callable[..., object], *inputs: object) -> object:
    """A checkpointed layer whose inputs wait in pinned host memory; on a CPU they are copied.

    Both copies run on the stream of the computation: 2 x inputs / bandwidth of the bus is added to each pass.
    """
    with save_on_cpu(pin_memory=True):
        return run(layer, *inputs)
