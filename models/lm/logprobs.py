"""Log-probs and entropy of chosen tokens, from logits. Pure: no model, no device of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.settings import CHUNK_LOGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is wanted of R rows of logits: the log-prob of one token each, after `temperature`.

    want_entropy: the entropy of each row too. entropy_gradient: that gradients pass through it.
    fp32_logits:  16-bit hidden states and weights give logits that aren't rounded to 16 bits.
    chunk_logits: about how many logits exist in float at a time.
    """

    chosen_R: Tensor
    want_entropy: bool = False
    entropy_gradient: bool = True
    temperature: float = 1.0
    fp32_logits: bool = False
    chunk_logits: int = CHUNK_LOGITS


def compute_chosen_logprobs(logits_RV: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Log-softmax of row r at chosen_R[r], and the entropy of row r (zeros unless wanted). R: rows, V: vocabulary.

    Returns float32 (float64 for float64 logits), natural log. Only `chunk_logits` logits at a time are copied to float;
    the backward pass computes each chunk again.
    """
    chunk_rows = max(1, wanted.chunk_logits // logits_RV.shape[-1])
    if len(logits_RV) <= chunk_rows:
        return _chunk(logits_RV, wanted.chosen_R, wanted)
    pieces = [
        checkpoint(_chunk, logits, chosen, wanted, use_reentrant=False)
        for logits, chosen in zip(logits_RV.split(chunk_rows), wanted.chosen_R.split(chunk_rows), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _chunk(logits_RV: Tensor, chosen_R: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    # fp32: a logsumexp in bf16 is off by up to 1 %, which makes the ratio of two of them clip wrongly.
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    if wanted.temperature != 1.0:  # in float32, as engines do: a quotient rounded to bf16 is off by 1 % and more
        logits_RV = logits_RV / wanted.temperature
    log_p_RV = logits_RV.log_softmax(dim=-1)  # one kernel each way, unlike logsumexp
    logprobs_R = log_p_RV.gather(-1, chosen_R[:, None]).squeeze(-1)
    if not wanted.want_entropy:
        return logprobs_R, torch.zeros_like(logprobs_R)
    with torch.set_grad_enabled(wanted.entropy_gradient and torch.is_grad_enabled()):
        return logprobs_R, -(log_p_RV.exp() * log_p_RV).sum(dim=-1)
