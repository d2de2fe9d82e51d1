"""How tokens spread over the experts of a mixture, summed over forward passes.

L: routers, one per layer with experts, E: experts of a layer, T: tokens, K: experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grmpipe.models.lm.moe.expert_routing import Routed, Routers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBalance:
    """The load of a layer's experts is the number of tokens that each gets.

    max_violation: largest load / mean load - 1 (MaxVio, arXiv 2408.15664), 0 if all are equal: the mean over layers.
    worst_max_violation: that of the worst layer.
    unused_share: the share of experts without a token, over all layers.
    router_entropy: the entropy of a token's distribution over experts, mean over tokens and layers, in nats.
    """

    max_violation: float
    worst_max_violation: float
    unused_share: float
    router_entropy: float

    @staticmethod
    def of(load_LE: Tensor, entropy_L: Tensor, num_tokens: float) -> LoadBalance:
        """entropy_L: sums over tokens."""
        violation_L = load_LE.max(1).values / load_LE.mean(1) - 1
        return LoadBalance(
            max_violation=violation_L.mean().item(),
            worst_max_violation=violation_L.max().item(),
            unused_share=(load_LE == 0).double().mean().item(),
            router_entropy=entropy_L.mean().item() / num_tokens,
        )


class ExpertLoad:
    """Sums on one rank, which `read` adds over the ranks. Used for one batch."""

    def __init__(self, routers: Routers, device: torch.device) -> None:
        self._routers = routers
        num_layers, num_experts = len(routers.shape.layers), routers.shape.num_experts
        self._load_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._entropy_L = torch.zeros(num_layers, dtype=torch.float64, device=device)
        self._num_tokens = 0

    @contextmanager
    def count_experts(self) -> Iterator[None]:
        """Context: forward passes count, with the experts that a replay chose if there is one. Leave it before the
        backward pass, which may run the forward pass again.
        """
        with self._routers.hook(self._count):
            yield

    def read(self) -> LoadBalance:
        """The balance over all ranks' tokens. A collective."""
        own = [self._load_LE.double().flatten(), self._entropy_L, self._entropy_L.new_tensor([self._num_tokens])]
        summed = torch.cat(own)
        dist.all_reduce(summed)
        load, entropy_L, num_tokens = summed.split([self._load_LE.numel(), len(self._entropy_L), 1])
        return LoadBalance.of(load.view(self._load_LE.shape), entropy_L, num_tokens.item())

    @torch.no_grad()
    def _count(self, index: int, router: nn.Module, routed: Routed) -> None:
        logits_TE, _, experts_TK = routed
        chosen_N = experts_TK.flatten()
        self._load_LE[index].scatter_add_(0, chosen_N, torch.ones_like(chosen_N))
        log_p_TE = logits_TE.float().log_softmax(-1)
        self._entropy_L[index] -= (log_p_TE.exp() * log_p_TE).sum().double()
        if index == 0:
            self._num_tokens += len(logits_TE)
