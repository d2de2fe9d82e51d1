"""The output head of a causal language model, which gives logits, or on request only what is wanted of them.

It stays where its model calls it: FSDP2 gathers and frees its weights around the call, tied or not. Chooses no tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from grmpipe.models.lm.logprobs import Wanted, linear_logprobs


@dataclass
class TrunkOutput(MoeModelOutputWithPast):
    """What any trunk returns, as far as its head reads it."""

    cross_attentions: tuple[Tensor, ...] | None = None


class OutputHead(nn.Linear):
    """A linear output head whose output the model returns unchanged, as its logits."""

    _wanted: Wanted | None = None

    @contextmanager
    def return_logprobs(self, wanted: Wanted) -> Iterator[None]:
        """Context: the head, and so its model, returns log-probs and entropies ([1, R, 2 + K]) in place of
        logits.
        """
        self._wanted = wanted
        try:
            yield
        finally:
            self._wanted = None

    def forward(self, hidden: Tensor) -> Tensor:
        wanted = self._wanted
        if wanted is None:
            return super().forward(hidden)
        assert hidden.shape[0] == 1, "samples are packed in one row"
        out = linear_logprobs(hidden[0], self.weight, self.bias, wanted)
        return out[None].clone()  # FSDP2 warns of outputs that are views


def find_output_head(model: PreTrainedModel) -> None:
    """Make the head of a new model an `OutputHead`, in place, if the model's logits are what its head returns.

    Some families scale or cap them (Gemma 2, Cohere, Granite): their head stays what it is.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and _returns_output_of(model, head):
        head.__class__ = OutputHead


def _returns_output_of(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Whether the model's logits are the very tensor that its head returns. Its trunk does not run."""
    trunk, device = model.base_model, head.weight.device
    if trunk is model:
        return False
    hidden = torch.zeros((1, 1, head.in_features), dtype=head.weight.dtype, device=device)
    returned: list[Tensor] = []
    keep = head.register_forward_hook(lambda _, inputs, output: returned.append(output))
    trunk.forward = lambda *_, **__: TrunkOutput(last_hidden_state=hidden)  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False).logits
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # a forward pass of another kind
    finally:
        keep.remove()
        del trunk.forward
    return len(returned) == 1 and logits is returned[0]
