"""Log-probs of chosen tokens and entropies, from logits. Pure: no model, no device of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grmpipe.models.settings import CHUNK_LOGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is wanted of R rows of logits: the log-prob of one token each, after `temperature`.

    also_RK:      K further tokens of each row whose log-probs are wanted.
    want_entropy: the entropy of each row too. entropy_gradient: that gradients pass through it.
    fp32_logits:  16-bit hidden states and weights give logits that aren't rounded to 16 bits.
    chunk_logits: about how many logits exist in float at a time.
    """

    chosen_R: Tensor
    also_RK: Tensor | None = None
    want_entropy: bool = False
    entropy_gradient: bool = True
    temperature: float = 1.0
    fp32_logits: bool = False
    chunk_logits: int = CHUNK_LOGITS

    @property
    def chosen_RK(self) -> Tensor:
        """All tokens of each row whose log-probs are wanted."""
        chosen_R1 = self.chosen_R[:, None]
        return chosen_R1 if self.also_RK is None else torch.cat([chosen_R1, self.also_RK], dim=1)


LOGPROB, ENTROPY, ALSO = 0, 1, 2  # columns of a result; from ALSO on those of also_RK


def compute_chosen_logprobs(logits_RV: Tensor, wanted: Wanted) -> Tensor:
    """[R, 2 + K]: log-softmax of row r at chosen_R[r], the entropy of row r (zeros unless wanted), and the log-softmax
    at also_RK[r]. R: rows, V: vocabulary.

    Returns float32 (float64 for float64 logits), natural log. Only `chunk_logits` logits at a time are copied to float;
    the backward pass computes each chunk again.
    """
    chunk_rows, chosen_RK = max(1, wanted.chunk_logits // logits_RV.shape[-1]), wanted.chosen_RK
    if len(logits_RV) <= chunk_rows:
        return _chunk(logits_RV, chosen_RK, wanted)
    pieces = [
        checkpoint(_chunk, logits, chosen, wanted, use_reentrant=False)
        for logits, chosen in zip(logits_RV.split(chunk_rows), chosen_RK.split(chunk_rows), strict=True)
    ]
    return torch.cat(pieces)


def put_in_columns(logprobs_RK: Tensor, entropy_R: Tensor) -> Tensor:
    """The result of these log-probs, of which the first is the chosen token's."""
    return torch.cat([logprobs_RK[:, :1], entropy_R[:, None], logprobs_RK[:, 1:]], dim=1)


def _chunk(logits_RV: Tensor, chosen_RK: Tensor, wanted: Wanted) -> Tensor:
    # fp32: a logsumexp in bf16 is off by up to 1 %, which makes the ratio of two of them clip wrongly.
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    if wanted.temperature != 1.0:  # in float32, as engines do: a quotient rounded to bf16 is off by 1 % and more
        logits_RV = logits_RV / wanted.temperature
    log_p_RV = logits_RV.log_softmax(dim=-1)  # one kernel each way, unlike logsumexp
    logprobs_RK = log_p_RV.gather(-1, chosen_RK)
    if not wanted.want_entropy:
        return put_in_columns(logprobs_RK, torch.zeros_like(logprobs_RK[:, 0]))
    with torch.set_grad_enabled(wanted.entropy_gradient and torch.is_grad_enabled()):
        entropy_R = -(log_p_RV.exp() * log_p_RV).sum(dim=-1)
    return put_in_columns(logprobs_RK, entropy_R)
