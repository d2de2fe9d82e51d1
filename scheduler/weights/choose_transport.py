"""Chooses the transport of weights from the learner to the engines of a role. Pure: moves nothing, asks no machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from grmpipe.models.types import TransportKind


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPath:
    """The places at both ends of a transport: the learner, and the engines of a role.

    with_engine:  rank 0, which sends broadcasts, has an engine on its GPU.
    all_shared:   every engine is on the GPU of a learner's rank.
    same_process: the engine is in the learner's process (the in-process cluster).
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


def choose_transport(
    wanted: TransportKind | None, engine: str, taken: Sequence[TransportKind], path: WeightPath
) -> TransportKind:
    """The transport that is wanted, or (None) the best. Raises ValueError that names what works instead.

    taken: transports that engines of the kind `engine` support, the best first.
    """
    able = [kind for kind in taken if possible(kind, path)]
    if wanted is None and not able:
        supported = ", ".join(kind.name for kind in taken)
        raise ValueError(
            f"sync.transport: engine={engine} supports only {supported}, and none works between these places"
        )
    if wanted is None:
        return next((kind for kind in able if kind.inline and path.same_process), able[0])
    if wanted in able:
        return wanted
    reason = f"{wanted.name} {wanted.needs}" if wanted in taken else f"engine={engine} doesn't support {wanted.name}"
    names = ["auto", *(kind.name for kind in able)]
    raise ValueError(f"sync.transport: {reason}; set sync.transport to {' or '.join(names)}")


def possible(kind: TransportKind, path: WeightPath) -> bool:
    """Whether the placement allows this transport."""
    if (kind.same_machine and not path.same_machine) or (kind.own_processes and path.same_process):
        return False
    if kind.gpus == "apart":
        return path.all_on_gpus and not path.with_engine
    if kind.gpus == "shared":
        return path.all_on_gpus and path.all_shared
    return True
