"""Context parallelism by Ulysses (arXiv 2309.14509): ranks that compute the same packed samples.

Each rank of a context group holds a slice of the packed tokens. Around attention, all-to-all exchanges tokens for
heads: there each rank has all tokens and a share of the heads.

T: packed tokens, P: tokens of a slice (a slice at the end is padded), H: heads, D: head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from grmpipe.models.lm.parallel.exchange import exchange_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRanks:
    """The ranks that share samples, as one of them sees them. All methods that move data are collectives."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(mesh: DeviceMesh | None) -> ContextRanks | None:
        """None: each rank has samples of its own."""
        if mesh is None:
            return None
        return ContextRanks(group=mesh.get_group(), rank=mesh.get_local_rank(), size=mesh.size())

    def own_slice(self, whole_T: Tensor, fill: int = 0) -> Tensor:
        """[T, ..] -> [P, ..]: this rank's tokens, in their order; `fill` where there are no more."""
        own = whole_T[self._start(len(whole_T)) :][: self._length(len(whole_T))]
        missing = self._length(len(whole_T)) - len(own)
        return torch.cat([own, own.new_full((missing, *own.shape[1:]), fill)]) if missing else own

    def own_places(self, places_R: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Which of these places among all tokens this rank holds (bool), and where those are in its slice."""
        behind_R = places_R - self._start(num_tokens)
        is_own_R = (behind_R >= 0) & (behind_R < self._length(num_tokens))
        return is_own_R, behind_R[is_own_R]

    def whole(self, own_P: Tensor, num_tokens: int) -> Tensor:
        """[P, ..] -> [T, ..]: the slices of all ranks, on each rank. Without gradients."""
        slices = [torch.empty_like(own_P) for _ in range(self.size)]
        dist.all_gather(slices, own_P.contiguous(), group=self.group)
        return torch.cat(slices)[:num_tokens]

    def unite(self, own: Tensor) -> Tensor:
        """Tensors that are 0 but for each rank's own entries -> all entries, on each rank.

        Every rank computes the same loss of the result, so the gradient of the loss needs no exchange: that of a rank's
        own entries starts there, and the entries of others are passed on to zeros. Summed over ranks, the gradients of
        weights are those of one loss.
        """
        united: Tensor = _United.apply(own, self.group)  # type: ignore[no-untyped-call]
        return united

    def unite_slices(self, own_P: Tensor, num_tokens: int) -> Tensor:
        """[P] -> [T]: the slices of all ranks, on each rank, with gradients as of `unite`."""
        length = len(own_P)
        placed = F.pad(own_P, (self.rank * length, (self.size - 1 - self.rank) * length))
        return self.unite(placed)[:num_tokens]

    def with_all_tokens(self, states_PHD: Tensor, num_tokens: int) -> Tensor:
        """[P, H, D] -> [T, H / size, D]: this rank's heads, at all tokens."""
        by_rank = states_PHD.unflatten(1, (self.size, -1)).transpose(0, 1)
        return exchange_rows(by_rank, self.group).flatten(0, 1)[:num_tokens]

    def with_all_heads(self, states_THD: Tensor) -> Tensor:
        """[T, H / size, D] -> [P, H, D]: this rank's tokens, with all heads. 0 where there are no more tokens."""
        length = self._length(len(states_THD))
        padded = F.pad(states_THD, (0, 0, 0, 0, 0, length * self.size - len(states_THD)))
        return exchange_rows(padded.unflatten(0, (self.size, length)), self.group).transpose(0, 1).flatten(1, 2)

    def for_each_rank(self, states_PGD: Tensor) -> Tensor:
        """Keys or values, repeated until their heads can be divided: each rank gets those that its query heads read."""
        num_heads = states_PGD.shape[1]
        return states_PGD.repeat_interleave(math.lcm(num_heads, self.size) // num_heads, dim=1)

    def _length(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.size)

    def _start(self, num_tokens: int) -> int:
        return self.rank * self._length(num_tokens)


class _United(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        united = own.clone()
        dist.all_reduce(united, group=group)
        return united

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
