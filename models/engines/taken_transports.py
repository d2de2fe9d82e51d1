"""Which weight transports each kind of engine takes. Loads neither engines nor transports."""

from __future__ import annotations

from dataclasses import dataclass

from models.types import TransportKind
from models.weights.transports import TRANSPORTS


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTransports:
    """best_first: names in TRANSPORTS. any_other: every other too, by the receiving end in the transport's own file."""

    best_first: tuple[str, ...]
    any_other: bool = False

    def among(self, *others: TransportKind) -> tuple[TransportKind, ...]:
        """These, the best first, then what else is taken: of the table, and of `others`."""
        best = [TRANSPORTS[name] for name in self.best_first]
        return tuple(dict.fromkeys([*best, *TRANSPORTS.values(), *others] if self.any_other else best))


TAKES: dict[str, TakenTransports] = {
    "embedded": TakenTransports(best_first=("cuda_ipc", "nccl", "shared_memory", "object_store"), any_other=True),
    "vllm": TakenTransports(best_first=("cuda_ipc", "nccl", "shared_memory", "gloo"), any_other=True),
    "sglang": TakenTransports(best_first=("nccl", "gloo", "disk")),
}
