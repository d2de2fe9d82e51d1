"""One model on several ranks: FSDP2, precision, activation checkpointing. Never trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from models.lm.causal_lm import load_causal_lm, outline_causal_lm
from models.lm.scalar_head import HEAD, outline_scalar_head, start_scalar_head
from models.rendezvous import gloo_listening_towards, store_at

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # for ranks that wait for the first one to read a large checkpoint
WRITE_TIMEOUT = timedelta(hours=12)  # for the slowest disk; a dead rank is noticed elsewhere
_for_files: list[dist.ProcessGroup] = []  # one per process, besides torch's default group


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How a model is loaded: whole, and as an outline without numbers. Both functions take (path, dtype).

    exact: submodules that always compute in float32.
    """

    load: Callable[[str, str], PreTrainedModel]
    outline: Callable[[str, str], PreTrainedModel]
    exact: tuple[str, ...] = ()


CAUSAL_LM = Architecture(load=load_causal_lm, outline=outline_causal_lm)
SCALAR_HEAD = Architecture(load=start_scalar_head, outline=outline_scalar_head, exact=(HEAD,))


def choose_device(device: str, rank: int) -> torch.device:
    """The device of a rank: `cuda` if torch has one and `device` is empty, otherwise `device`; each rank has its own
    GPU.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise ValueError("device: cuda was requested, but torch finds no GPU; use cpu, or install torch for CUDA")
    # A Ray actor sees only its own GPU, as number 0; torchrun's ranks see all of them.
    return torch.device("cuda", rank % torch.cuda.device_count())


def join_ranks(rank: int, world_size: int, init_method: str | None, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks: gloo on CPU, NCCL on CUDA. A single rank needs no address and opens no socket.

    A single rank is sharded too (into one shard), so that there is one code path; it costs 6 % of the tiny model's
    step.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        if init_method is None and world_size > 1:
            raise ValueError(
                f"init_method: {world_size} ranks need a rendezvous address, such as tcp://127.0.0.1:29500"
            )
        _start_group(backend, rank, world_size, init_method)
    assert dist.get_world_size() == world_size, "this process already belongs to a group of a different size"
    return init_device_mesh(device.type, (world_size,))


def group_for_files() -> dist.ProcessGroup | None:
    """The group in which ranks meet while they write checkpoints during training, separate from training's own group.
    None for a single rank.
    """
    return _for_files[0] if _for_files else None


def _start_group(backend: str, rank: int, world_size: int, init_method: str | None) -> None:
    """Start torch's default group, and that of files. For tcp://address:port, sockets listen only at that address."""
    group = functools.partial(
        dist.init_process_group, backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    place = urlsplit(init_method or "")
    if not init_method:
        group(store=dist.HashStore())
    elif place.scheme == "tcp" and place.hostname and place.port:
        with gloo_listening_towards(place.hostname, place.port):
            group(store=store_at(place.hostname, place.port, rank, world_size, COLLECTIVE_TIMEOUT))
            _start_group_for_files(world_size)
    else:
        group(init_method=init_method)
        _start_group_for_files(world_size)


def _start_group_for_files(world_size: int) -> None:
    if world_size > 1:
        _for_files[:] = [dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)]


def load_parallel(
    path: str,
    mesh: DeviceMesh,
    device: torch.device,
    master_dtype: str,
    dtype: str,
    activation_checkpointing: bool,
    architecture: Architecture = CAUSAL_LM,
) -> PreTrainedModel:
    """Load a sharded model. Only rank 0 reads the weights, into host memory; no other rank ever holds more than its
    shards.

    A collective. Parameters are kept in `master_dtype`; compute happens in `dtype`.
    """
    whole = architecture.load(path, master_dtype) if dist.get_rank() == 0 else None
    model = architecture.outline(path, master_dtype)
    parallelize(model, mesh, dtype, activation_checkpointing, architecture.exact)
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
    mesh: DeviceMesh,
    dtype: str,
    activation_checkpointing: bool = False,
    exact: Sequence[str] = (),
) -> None:
    """Shard each layer and then the root, in place. Parameters keep their type; computation is in `dtype`, and in
    float32 within the submodules in `exact`.

    Gradients are averaged over ranks, in float32 where compute is in bfloat16.
    """
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        # transformers recomputes only in training mode. The flag is set only on the block: dropout below it stays off.
        layer.training = activation_checkpointing
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for name in exact:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=policy)


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
