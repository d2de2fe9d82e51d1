"""The table of weight transports: the requirements of each, and where its ends are. Imports neither torch nor any of
them.

A new one is a file with both its ends (see shared_memory.py) and a row here. A user's own is a TransportKind that
`sync.transport` names by its dotted path.
"""

from grmpipe.models.import_path import import_module
from grmpipe.models.types import TransportKind

TRANSPORTS: dict[str, TransportKind] = {
    kind.name: kind
    for kind in (
        TransportKind(
            name="shared_memory",
            sender="grmpipe.models.weights.shared_memory.SharedMemoryFiles",
            same_machine=True,
            needs="needs learner and engines on one machine",
        ),
        TransportKind(
            name="disk", sender="grmpipe.models.weights.safetensors_files.SafetensorsFiles", folder=True, delta=True
        ),
        TransportKind(
            name="gloo",
            sender="grmpipe.models.weights.broadcast.GlooBroadcasts",
            group="gloo",
            own_processes=True,
            needs="needs the engines in separate processes (cluster=ray)",
        ),
        TransportKind(
            name="nccl",
            sender="grmpipe.models.weights.broadcast.NcclBroadcasts",
            group="nccl",
            own_processes=True,
            gpus="apart",  # NCCL refuses two ranks on one device
            needs="needs the learner's first rank on a GPU without an engine, and engines on GPUs in other processes",
        ),
        TransportKind(
            name="cuda_ipc",
            sender="grmpipe.models.weights.cuda_ipc.CudaMemory",
            own_processes=True,  # a process can't open its own handle
            gpus="shared",
            every_rank=True,
            needs="needs every engine on the GPU of a learner rank, in another process",
        ),
        TransportKind(
            name="object_store", sender="grmpipe.models.weights.object_store.ObjectStore", inline=True, delta=True
        ),
    )
}


def transport_kind(name: str) -> TransportKind:
    """A row of the table, or a user's own by its dotted path. Raises ValueError that names `sync.transport`."""
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    if "." not in name:
        raise ValueError(
            f"sync.transport: unknown transport {name!r}; known: {', '.join(TRANSPORTS)}; your own by its dotted path, "
            "like my_package.my_module.PIGEON"
        )
    kind = import_transport(name)
    if not isinstance(kind, TransportKind):
        raise ValueError(f"sync.transport: {name} is no TransportKind")
    return kind


def import_transport(path: str) -> object:
    """The object at a dotted path. Raises ValueError if it can't be imported."""
    module, _, name = path.rpartition(".")
    found = vars(import_module(module, "sync.transport"))
    if name not in found:
        raise ValueError(f"sync.transport: the module {module} has no {name}")
    return found[name]
