"""Which way weights take from the learner to the engines of a role. Pure: moves nothing, asks no machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TRANSPORTS = ("auto", "object_store", "shared_memory", "disk", "gloo", "nccl", "cuda_ipc")
BROADCASTS = ("gloo", "nccl")  # a process group carries them
WHY = {
    "shared_memory": "needs learner and engines on one machine",
    "gloo": "needs the engines in processes of their own (cluster=ray)",
    "nccl": "needs a GPU for the learner's first rank that has no engine, and engines on GPUs in other processes",
    "cuda_ipc": "needs every engine on the GPU of a rank of the learner's, in another process",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """From the learner to the engines of a role.

    with_engine:  rank 0, which sends what is broadcast, has an engine on its GPU.
    all_shared:   every engine is on the GPU of some rank.
    same_process: the engine's weights lie in the learner's own process (the in-process cluster).
    """

    learner: str  # "cpu" or "gpu"
    engines: str
    same_machine: bool
    with_engine: bool = False
    all_shared: bool = False
    same_process: bool = False

    @property
    def all_on_gpus(self) -> bool:
        return self.learner == self.engines == "gpu"


def choose_transport(wanted: str, engine: str, takes: Sequence[str], route: Route) -> str:
    """The transport for `sync.transport=wanted`. takes: what engines of this kind can take at all, the best first.

    Raises ValueError naming what works instead.
    """
    able = [transport for transport in takes if possible(transport, route)]
    if wanted == "auto" and able:
        return "object_store" if route.same_process and "object_store" in able else able[0]
    if wanted == "auto":
        raise ValueError(f"sync.transport: engine={engine} takes {', '.join(takes)} alone, and none works between them")
    if wanted in able:
        return wanted
    reason = f"{wanted} {WHY[wanted]}" if wanted in takes else f"engine={engine} can't take {wanted}"
    raise ValueError(f"sync.transport: {reason}; set sync.transport to {' or '.join(['auto', *able])}")


def possible(transport: str, route: Route) -> bool:
    """Whether the places allow it."""
    if transport == "shared_memory":
        return route.same_machine
    if transport == "gloo":
        return not route.same_process
    if transport == "nccl":
        # NCCL refuses two ranks on one device.
        return route.all_on_gpus and not route.with_engine and not route.same_process
    if transport == "cuda_ipc":
        # A process can't open a handle of its own.
        return route.all_on_gpus and route.all_shared and not route.same_process
    return True
