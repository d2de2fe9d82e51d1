"""The ranks that train one model: the device of each, how they meet, and the meshes that they form."""

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grmpipe.models.rendezvous import gloo_listening_towards, store_at
from grmpipe.models.settings import ParallelConfig

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # for ranks that wait for the first one to read a large checkpoint
WRITE_TIMEOUT = timedelta(hours=12)  # for the slowest disk; a dead rank is noticed elsewhere
ONE_COPY = ParallelConfig()
_for_files: list[dist.ProcessGroup] = []  # one per process, besides torch's default group


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeshes:
    """The ranks of one model, as each kind of parallelism groups them. Each mesh holds this rank.

    shards: over which FSDP2 shards weights; with several copies of the model two-dimensional: (copies, shards).
    context: the ranks that share each sample; None: each rank has samples of its own.
    data: the ranks that together have each sample once, one of each context group; None: all ranks.
    experts: (dp_replicate, efsdp, ep), or (efsdp, ep) with one copy of the model: the ranks along ep divide the experts
        of each layer, those along efsdp shard the same ones; None: experts are sharded like other weights.
    """

    shards: DeviceMesh
    context: DeviceMesh | None = None
    data: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """In which sums over samples are added up. None: torch's default group."""
        return None if self.data is None else self.data.get_group()


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


def join_ranks(
    rank: int,
    world_size: int,
    init_method: str | None,
    device: torch.device,
    parallel: ParallelConfig = ONE_COPY,
) -> RankMeshes:
    """The meshes of all ranks: gloo on CPU, NCCL on CUDA. A single rank needs no address and opens no socket.

    A single rank is sharded too (into one shard), so that there is one code path; it costs 6 % of the tiny model's
    step.
    """
    place = urlsplit(init_method or "")
    at = (place.hostname, place.port) if place.scheme == "tcp" and place.hostname and place.port else None
    # Sockets listen only at the rendezvous address.
    with gloo_listening_towards(*at) if at else nullcontext():
        if not dist.is_initialized():
            if init_method is None and world_size > 1:
                raise ValueError(
                    f"init_method: {world_size} ranks need a rendezvous address, such as tcp://127.0.0.1:29500"
                )
            _start_group("nccl" if device.type == "cuda" else "gloo", rank, world_size, init_method, at)
        assert dist.get_world_size() == world_size, "this process already belongs to a group of a different size"
        return _meshes(device.type, world_size, parallel)


def _meshes(device_type: str, world_size: int, parallel: ParallelConfig) -> RankMeshes:
    """Neighbouring ranks share samples and experts; copies of the model lie furthest apart, on different nodes."""
    copies, cp = parallel.dp_replicate, parallel.cp
    if copies == 1:
        shards = init_device_mesh(device_type, (world_size,))
    else:
        names = ("dp_replicate", "dp_shard")
        shards = init_device_mesh(device_type, (copies, world_size // copies), mesh_dim_names=names)
    meshes = RankMeshes(shards=shards)
    if cp > 1:
        shared = init_device_mesh(device_type, (world_size // cp, cp), mesh_dim_names=("data", "context"))
        meshes = replace(meshes, context=shared["context"], data=shared["data"])
    return replace(meshes, experts=_experts_mesh(device_type, world_size, parallel)) if parallel.ep > 1 else meshes


def _experts_mesh(device_type: str, world_size: int, parallel: ParallelConfig) -> DeviceMesh:
    copies, ep = parallel.dp_replicate, parallel.ep
    shape, names = (copies, world_size // copies // ep, ep), ("dp_replicate", "efsdp", "ep")
    first = 0 if copies > 1 else 1
    return init_device_mesh(device_type, shape[first:], mesh_dim_names=names[first:])


def group_for_files() -> dist.ProcessGroup | None:
    """The group in which ranks meet while they write checkpoints during training, separate from training's own group.
    None for a single rank.
    """
    return _for_files[0] if _for_files else None


def _start_group(backend: str, rank: int, world_size: int, init_method: str | None, at: tuple[str, int] | None) -> None:
    """Start torch's default group, and that of files. at: address and port of a tcp:// init_method."""
    group = functools.partial(
        dist.init_process_group, backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    if not init_method:
        group(store=dist.HashStore())
        return
    if at is not None:
        group(store=store_at(*at, rank, world_size, COLLECTIVE_TIMEOUT))
    else:
        group(init_method=init_method)
    if world_size > 1:
        _for_files[:] = [dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)]
