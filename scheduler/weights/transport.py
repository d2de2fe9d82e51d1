"""Which way weights take from the learner to the engines of a role. Pure: moves nothing, asks no machine."""

from __future__ import annotations

from dataclasses import dataclass

TRANSPORTS = ("auto", "object_store", "shared_memory", "disk", "gloo", "nccl", "cuda_ipc")
BROADCASTS = ("gloo", "nccl")  # a process group carries them
# What each kind of engine can take at all.
TAKES: dict[str, tuple[str, ...]] = {
    "embedded": ("object_store", "shared_memory", "disk", "gloo", "nccl", "cuda_ipc"),
    "vllm": ("shared_memory", "disk", "gloo", "nccl", "cuda_ipc", "object_store"),
    "sglang": ("disk", "gloo", "nccl"),
}
WHY = {
    "shared_memory": "needs learner and engines on one machine",
    "gloo": "needs the engines in separate processes (cluster=ray)",
    "nccl": "needs the learner's first rank on a GPU without an engine, and engines on GPUs in other processes",
    "cuda_ipc": "needs every engine on the GPU of a learner rank, in another process",
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


def choose_transport(wanted: str, engine: str, route: Route) -> str:
    """The transport for `sync.transport=wanted` and engines of a kind. Raises ValueError naming what works instead."""
    able = [transport for transport in TAKES[engine] if possible(transport, route)]
    if wanted == "auto":
        return _best(engine, route)
    if wanted in able:
        return wanted
    reason = f"{wanted} {WHY[wanted]}" if wanted in TAKES[engine] else f"engine={engine} doesn't support {wanted}"
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


def _best(engine: str, route: Route) -> str:
    if route.same_process:
        return "object_store"
    for transport in ("cuda_ipc", "nccl"):  # else some engines are beside the sender and some are not
        if transport in TAKES[engine] and possible(transport, route):
            return transport
    if engine == "sglang":
        return "gloo"
    if route.same_machine:
        return "shared_memory"
    return "object_store" if engine == "embedded" else "gloo"
