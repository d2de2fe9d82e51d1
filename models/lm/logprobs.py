"""Log-probs of chosen tokens and entropies, from logits. Pure: no model, no device of its own."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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


# -- from hidden states and the weights of the output head -------------------------------------------------------------
# The logits are computed for some columns of the vocabulary at a time, forward and again backward: neither all of them
# nor their gradient ever exist. (A chunk of columns, not of rows: the gradient of its weights is then one product over
# all rows, summed in float32 by the kernel, and needs no accumulator as large as the head.)
# R: rows, D: hidden size, V: vocabulary, C: columns of a chunk.


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
