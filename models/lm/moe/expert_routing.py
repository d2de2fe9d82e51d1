"""Routing of tokens to experts: recorded in one forward pass, replayed in another.

Near-ties of a router change with the precision, the batch or the kernel, and another expert is another function: the
log-probs of sampler and learner then differ by far more than rounding. Replay fixes only the choice: the gates of the
chosen experts are computed again, and their gradient reaches the router (R2 and R3, arXiv 2507.18071 and 2510.11370).

T: tokens, L: routers, one per layer with experts, K: experts per token, E: experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grmpipe.models.types import ANY_EXPERT

Gates = Callable[[Any, Tensor, Tensor], Tensor]  # (router, logits_TE, experts_TK) -> gates_TK
Routed = tuple[Tensor, Tensor, Tensor]  # logits_TE, gates_TK, experts_TK: what a router returns
Hook = Callable[[int, nn.Module, Routed], Routed | None]  # (router's index, router, its output) -> new output


def softmax_over_all(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Gates of Qwen and OLMoE: probabilities among all experts; normalised over the chosen ones if the model says
    so.
    """
    gates_TK = logits_TE.softmax(-1, dtype=torch.float).gather(-1, experts_TK)
    if router.norm_topk_prob:
        gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
    return gates_TK.to(logits_TE.dtype)


def softmax_over_chosen(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Gates of Mixtral: always normalised, in float32."""
    gates_TK = logits_TE.float().softmax(-1).gather(-1, experts_TK)
    return gates_TK / gates_TK.sum(-1, keepdim=True)


# By class name: importing all families of transformers would take a second.
ROUTERS: dict[str, Gates] = {
    "Qwen2MoeTopKRouter": softmax_over_all,
    "Qwen3MoeTopKRouter": softmax_over_all,
    "OlmoeTopKRouter": softmax_over_all,
    "MixtralTopKRouter": softmax_over_chosen,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """The routing of one token: `top_k` experts for each router; the layers of the routers."""

    layers: tuple[int, ...]
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds an expert's index."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16


class Routers:
    """The routers of one model, in the order of its layers."""

    def __init__(self, routers: Sequence[nn.Module], shape: RoutingShape) -> None:
        self._routers = tuple(routers)
        self.shape = shape

    @staticmethod
    def of(model: nn.Module) -> Routers:
        """The routers of a model. Raises ValueError for a dense model, and for routers that can't be replayed."""
        named = find_routers(model)
        unknown = sorted({_kind(module) for module in named.values()} - ROUTERS.keys())
        if unknown:
            raise ValueError(
                f"router_replay: the experts of {unknown[0]} can't be replayed; those of {', '.join(ROUTERS)} can; "
                "type algorithm.router_replay=none"
            )
        if not named:
            raise ValueError(
                f"router_replay: {type(model).__name__} has no router whose experts could be replayed: it is dense, "
                "or chooses them in an unknown way; type algorithm.router_replay=none"
            )
        router: Any = next(iter(named.values()))
        layers = tuple(map(_layer_of, named))
        shape = RoutingShape(layers=layers, top_k=router.top_k, num_experts=router.num_experts)
        return Routers(tuple(named.values()), shape)

    @staticmethod
    def find_in(model: nn.Module) -> Routers | None:
        """The routers of a model; None for a dense one, and for routers of unknown families."""
        kinds = {_kind(module) for module in find_routers(model).values()}
        return Routers.of(model) if kinds and kinds <= ROUTERS.keys() else None

    @contextmanager
    def record_routing(self) -> Iterator[Recording]:
        """Context: each forward pass is recorded."""
        recording = Recording(len(self._routers))
        with self.hook(recording.note):
            yield recording

    @contextmanager
    def replay(self, experts_TLK: Tensor) -> Iterator[RouterReplay]:
        """Context: forward passes send their T tokens to these experts, or to the router's own choice for ANY_EXPERT.
        The backward pass belongs in it too: activation checkpointing runs the forward pass again.
        """
        replay = RouterReplay(experts_TLK)
        with self.hook(replay.choose):
            yield replay

    @contextmanager
    def hook(self, hook: Hook) -> Iterator[None]:
        """Context: `hook` gets each router's output, with the experts of a replay that began earlier, and may replace
        it.
        """
        with ExitStack() as stack:
            for index, router in enumerate(self._routers):
                stack.callback(router.register_forward_hook(partial(_call, hook, index)).remove)
            yield


class Recording:
    """The routers' choices in the latest forward pass."""

    def __init__(self, num_routers: int) -> None:
        self._by_router: list[Tensor | None] = [None] * num_routers

    @property
    def experts_TLK(self) -> Tensor:
        """int64, in the pass's order of tokens, including padding."""
        return torch.stack([experts_TK for experts_TK in self._by_router if experts_TK is not None], dim=1)

    def note(self, index: int, router: nn.Module, routed: Routed) -> None:
        self._by_router[index] = routed[2]


class RouterReplay:
    """Experts that replace the routers' choice.

    rerouted_TL: whether the router would have sent the token elsewhere.
    """

    def __init__(self, experts_TLK: Tensor) -> None:
        self._experts_TLK = experts_TLK
        self.rerouted_TL = torch.zeros(experts_TLK.shape[:2], dtype=torch.bool, device=experts_TLK.device)

    def choose(self, index: int, router: nn.Module, routed: Routed) -> Routed:
        logits_TE, _, own_TK = routed
        wanted_TK = self._experts_TLK[:, index].to(own_TK.dtype)
        chosen_TK = torch.where(wanted_TK == ANY_EXPERT, own_TK, wanted_TK)
        self.rerouted_TL[:, index] = (chosen_TK.sort(-1).values != own_TK.sort(-1).values).any(-1)
        return logits_TE, ROUTERS[_kind(router)](router, logits_TE, chosen_TK), chosen_TK


def _call(hook: Hook, index: int, router: nn.Module, _: object, routed: Routed) -> Routed | None:
    return hook(index, router, routed)


def _kind(router: nn.Module) -> str:
    """The name of a router's class, also where FSDP2 has put one of its own before it."""
    name = type(router).__name__
    return name.removeprefix("FSDP") if isinstance(router, FSDPModule) else name


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model, by transformers' name for all of them: those of unknown families must be refused."""
    return {
        name: module for name, module in model.named_modules() if type(module).__name__.lower().endswith("topkrouter")
    }


def _layer_of(name: str) -> int:
    """model.layers.3.mlp.gate -> 3."""
    return int(next(part for part in name.split(".") if part.isdigit()))
