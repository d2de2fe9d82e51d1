"""Routers of the policy on one rank: experts that a pass replays or records, and how evenly a batch uses them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor, nn

from grmpipe.models.lm.moe.expert_load import ExpertLoad
from grmpipe.models.lm.moe.expert_routing import RouterReplay, Routers
from grmpipe.models.lm.parallel.context_parallel import ContextRanks
from grmpipe.models.types import ANY_EXPERT
from grmpipe.types import Metrics, OldPass


class ExpertReplay:
    """Does nothing for a dense model. Raises ValueError for `router_replay` with routers that can't be replayed."""

    def __init__(
        self, model: nn.Module, device: torch.device, context: ContextRanks | None, router_replay: str
    ) -> None:
        """context: ranks that share samples. router_replay: as in the configuration."""
        self.replays = router_replay != "none"
        self._records = router_replay == "old_logprobs"
        self._device = device
        self._context = context
        self._routers = Routers.of(model) if self.replays else Routers.find_in(model)
        self.begin_batch()

    def begin_batch(self) -> None:
        """Count the load from 0."""
        self._load = None if self._routers is None else ExpertLoad(self._routers, self._device)

    @contextmanager
    def replay_experts(self, experts_TLK: Tensor | None) -> Iterator[RouterReplay | None]:
        """Context: passes of the policy use these experts; None: those that its routers choose."""
        if not self.replays or self._routers is None or experts_TLK is None:
            yield None
            return
        wanted_TLK = experts_TLK.to(torch.int16)  # signed, for ANY_EXPERT
        if self._context is not None:
            wanted_TLK = self._context.own_slice(wanted_TLK, fill=ANY_EXPERT)
        with self._routers.replay(wanted_TLK) as replay:
            yield replay

    def record_old_pass(self, run: Callable[[], np.ndarray], num_tokens: int) -> OldPass:
        """The pass for pi_old, with its experts if they are replayed.

        run: a forward pass over a micro-batch of this many tokens, which returns its log-probs.
        """
        if not self._records or self._routers is None:
            return OldPass(logprobs_T=run())
        with self._routers.record_routing() as recording:
            logprobs_T = run()
        whole_TLK = self._whole(recording.experts_TLK.int(), num_tokens)
        return OldPass(logprobs_T=logprobs_T, experts_TLK=whole_TLK.to(self._routers.shape.dtype).cpu().numpy())

    @contextmanager
    def count_load(self, *, idle: bool) -> Iterator[None]:
        """Context: the tokens of forward passes count as the experts' load, but for those of an idle rank."""
        with nullcontext() if self._load is None or idle else self._load.count_experts():
            yield

    def balance(self) -> Metrics:
        """How evenly the batch used the experts; nothing for a dense model. A collective."""
        balance = {} if self._load is None else asdict(self._load.read())
        return {f"experts/{name}": value for name, value in balance.items()}

    def sum_rerouted(
        self, replay: RouterReplay | None, places_E: Tensor, loss_mask_E: Tensor, num_tokens: int
    ) -> Tensor:
        """The sum, over trained tokens, of the share of layers whose router would have chosen other experts."""
        if replay is None:
            return loss_mask_E.new_zeros(())
        shares_T = self._whole(replay.rerouted_TL.float().mean(1), num_tokens)
        return (shares_T[places_E] * loss_mask_E).sum()

    def _whole(self, own: Tensor, num_tokens: int) -> Tensor:
        """Entries of this rank's tokens -> those of the whole micro-batch."""
        return own if self._context is None else self._context.whole(own, num_tokens)
