"""Log-probs and entropy of chosen tokens, from logits. Pure: no model, no device of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.settings import CHUNK_LOGITS


def chosen_logprobs(
    logits_RV: Tensor,
    chosen_R: Tensor,
    want_entropy: bool = False,
    entropy_gradient: bool = True,
    chunk_logits: int = CHUNK_LOGITS,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-softmax of row r at chosen_R[r], and the entropy of row r (zeros unless wanted). R: rows, V: vocabulary.

    Both after `temperature`. Returns float32 (float64 for float64 logits), natural log. Only `chunk_logits` logits at a
    time are copied to float; the backward pass computes each chunk again.
    """
    chunk_rows = max(1, chunk_logits // logits_RV.shape[-1])
    if len(logits_RV) <= chunk_rows:
        return _chunk(logits_RV, chosen_R, want_entropy, entropy_gradient, temperature)
    pieces = [
        checkpoint(_chunk, logits, chosen, want_entropy, entropy_gradient, temperature, use_reentrant=False)
        for logits, chosen in zip(logits_RV.split(chunk_rows), chosen_R.split(chunk_rows), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _chunk(
    logits_RV: Tensor, chosen_R: Tensor, want_entropy: bool, entropy_gradient: bool, temperature: float
) -> tuple[Tensor, Tensor]:
    # fp32: a logsumexp in bf16 is off by up to 1 %, which makes the ratio of two of them clip wrongly.
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    if temperature != 1.0:  # in float32, as engines do: a quotient rounded to bf16 is off by 1 % and more
        logits_RV = logits_RV / temperature
    normaliser_R = logits_RV.logsumexp(dim=-1)
    logprobs_R = logits_RV.gather(-1, chosen_R[:, None]).squeeze(-1) - normaliser_R
    if not want_entropy:
        return logprobs_R, torch.zeros_like(logprobs_R)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # H = logsumexp(z) - sum softmax(z) z
        return logprobs_R, normaliser_R - ((logits_RV - normaliser_R[:, None]).exp() * logits_RV).sum(dim=-1)
