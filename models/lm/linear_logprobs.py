"""Log-probs and entropy of chosen tokens, from hidden states and the weights of the output head. Pure: no model.

The logits are computed for some columns of the vocabulary at a time, forward and again backward: neither all of them
nor their gradient ever exist. (A chunk of columns, not of rows: the gradient of its weights is then one product over
all rows, summed in float32 by the kernel, and needs no accumulator as large as the head.)

R: rows, D: hidden size, V: vocabulary, C: columns of a chunk.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grmpipe.models.lm.logprobs import ALSO, ENTROPY, LOGPROB, Wanted, put_in_columns

SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def linear_logprobs(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: Wanted) -> Tensor:
    """[R, 2 + K]: log-softmax of row r of the logits at chosen_R[r], the entropy of row r (zeros unless wanted), and
    the log-softmax at also_RK[r].

    Equal to `compute_chosen_logprobs` of the whole logits, up to the order of sums: float32 (float64 for float64),
    natural log. At most about `chunk_logits` logits exist at a time.
    """
    out: Tensor = _LinearLogprobs.apply(hidden_RD, weight_VD, bias_V, wanted)  # type: ignore[no-untyped-call]
    return out


class _LinearLogprobs(torch.autograd.Function):
    """With z the logits, p their softmax and H its entropy: d logprob / dz = onehot - p, dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        wanted: Wanted,
    ) -> Tensor:
        ctx.wanted, chosen_RK = wanted, wanted.chosen_RK
        normalisers, means, chosen_logit_RK = [], [], None
        for start, logits_RC in _chunks(hidden_RD, weight_VD, bias_V, ctx.wanted):
            normaliser_R = logits_RC.logsumexp(-1)
            normalisers.append(normaliser_R)
            here_RK, place_RK = _places(chosen_RK, start, logits_RC.shape[1])
            found_RK = torch.where(here_RK, logits_RC.gather(-1, place_RK), 0.0)
            chosen_logit_RK = found_RK if chosen_logit_RK is None else chosen_logit_RK + found_RK
            if wanted.want_entropy:
                means.append(((logits_RC - normaliser_R[:, None]).exp_() * logits_RC).sum(-1))
        assert chosen_logit_RK is not None, "a vocabulary has tokens"
        per_chunk_NR = torch.stack(normalisers)
        normaliser_R = per_chunk_NR.logsumexp(0)
        entropy_R = torch.zeros_like(normaliser_R)
        if wanted.want_entropy:  # H = logsumexp(z) - sum p z
            entropy_R = normaliser_R - ((per_chunk_NR - normaliser_R).exp() * torch.stack(means)).sum(0)
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, normaliser_R, entropy_R)
        return put_in_columns(chosen_logit_RK - normaliser_R[:, None], entropy_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RD, weight_VD, bias_V, normaliser_R, entropy_R = ctx.saved_tensors
        wanted: Wanted = ctx.wanted
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_hidden_RD = torch.zeros_like(hidden_RD, dtype=normaliser_R.dtype) if of_hidden else None
        grad_weight_VD = torch.empty_like(weight_VD) if of_weight else None
        grad_bias_V = torch.empty_like(bias_V) if of_bias else None
        entropy_grad_R = grad[:, ENTROPY]
        logprob_grad_RK, chosen_RK = torch.cat([grad[:, : LOGPROB + 1], grad[:, ALSO:]], dim=1), wanted.chosen_RK
        for start, logits_RC in _chunks(hidden_RD, weight_VD, bias_V, ctx.wanted):
            columns = slice(start, start + logits_RC.shape[1])
            here_RK, place_RK = _places(chosen_RK, start, logits_RC.shape[1])
            log_p_RC = logits_RC.sub_(normaliser_R[:, None])
            factor_RC: Tensor = logprob_grad_RK.sum(1, keepdim=True)
            if wanted.want_entropy and wanted.entropy_gradient:
                factor_RC = (log_p_RC + entropy_R[:, None]).mul_(entropy_grad_R[:, None]).add_(factor_RC)
            grad_RC = log_p_RC.exp_().mul_(factor_RC).neg_()
            del factor_RC
            grad_RC.scatter_add_(1, place_RK, here_RK * logprob_grad_RK)
            grad_RC = grad_RC.div_(wanted.temperature).to(hidden_RD.dtype)
            if grad_hidden_RD is not None:
                grad_hidden_RD += _product(grad_RC, weight_VD[columns], grad_hidden_RD.dtype)
            if grad_weight_VD is not None:
                torch.mm(grad_RC.t(), hidden_RD, out=grad_weight_VD[columns])
            if grad_bias_V is not None:
                grad_bias_V[columns] = grad_RC.sum(0)
        if grad_hidden_RD is not None:
            grad_hidden_RD = grad_hidden_RD.to(hidden_RD.dtype)
        return grad_hidden_RD, grad_weight_VD, grad_bias_V, None


def _chunks(
    hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: Wanted
) -> Iterator[tuple[int, Tensor]]:
    """The logits of some columns at a time, in float and after temperature, with the number of the first column."""
    for start, stop in split_columns(len(hidden_RD), len(weight_VD), wanted.chunk_logits):
        rows_CD = weight_VD[start:stop]
        kind = torch.promote_types(hidden_RD.dtype, torch.float32)
        logits_RC = _product(hidden_RD, rows_CD.t(), kind if wanted.fp32_logits else hidden_RD.dtype)
        if bias_V is not None:
            logits_RC += bias_V[start:stop]
        logits_RC = logits_RC.to(kind)
        yield start, logits_RC.div_(wanted.temperature) if wanted.temperature != 1.0 else logits_RC


def split_columns(num_rows: int, vocab_size: int, chunk_logits: int) -> Iterator[tuple[int, int]]:
    """The first and last column of each chunk, all of about the same size."""
    num_chunks = min(vocab_size, max(1, -(-num_rows * vocab_size // chunk_logits)))
    ends = [vocab_size * chunk // num_chunks for chunk in range(num_chunks + 1)]
    yield from itertools.pairwise(ends)


def _product(left_AB: Tensor, right_BC: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix product in `dtype`. For 16-bit factors in float32: without rounding it to 16 bits."""
    if left_AB.dtype == dtype or left_AB.dtype not in SIXTEEN_BIT:
        return left_AB @ right_BC
    if left_AB.is_cuda:
        return torch.mm(left_AB, right_BC, out_dtype=dtype)
    return left_AB.to(dtype) @ right_BC.to(dtype)


def _places(chosen_RK: Tensor, start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Whether each token of a row is in the chunk, and its column there; column 0 if it isn't."""
    column_RK = chosen_RK - start
    here_RK = (column_RK >= 0) & (column_RK < num_columns)
    return here_RK, torch.where(here_RK, column_RK, 0)
