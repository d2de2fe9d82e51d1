"""Sampling of tokens: counter-based uniforms, limits (top-p, top-k, min-p), inverse CDF. Pure: a sample depends only on
its own row.

B: rows, V: vocabulary, N: blocks of it, K: tokens of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), as signed 64-bit integers.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64

BLOCK = 128
FEW_TOKENS = 4096  # of a vocabulary that isn't worth two searches


def uniforms(seeds_B: Tensor, counters_B: Tensor) -> Tensor:
    """Float64 in [0, 1), a function only of (seed, counter): no state, no order of calls. Both are int64."""
    bits_B = _mix(_mix(seeds_B) + counters_B * GOLDEN_GAMMA)
    return _shift_right(bits_B, 11).double() * 2.0**-53


def draw(
    logits_BV: Tensor, temperature_B: Tensor, limits_B3: Tensor | None, uniforms_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row. Returns it, its log-prob under the distribution that was sampled from, and all of
    these log-probs.

    A row of temperature 0 takes the likeliest token, with its log-prob at temperature 1. `limits_B3`: see keep_likely;
    None if no row has any.
    """
    greedy_B = temperature_B == 0
    logits_BV = logits_BV.float()
    divisor_B = torch.where(greedy_B, 1.0, temperature_B)
    if (divisor_B != 1).any():
        logits_BV = logits_BV / divisor_B[:, None]
    if limits_B3 is not None:
        logits_BV = torch.where(greedy_B[:, None], logits_BV, keep_likely(logits_BV, limits_B3))
    logprobs_BV = logits_BV.log_softmax(-1)
    drawn_B = _invert_cdf(logprobs_BV.exp(), uniforms_B)
    if greedy_B.any():  # argmax takes longer than all else here
        drawn_B = torch.where(greedy_B, logprobs_BV.argmax(-1), drawn_B)
    return drawn_B, logprobs_BV.gather(-1, drawn_B[:, None])[:, 0], logprobs_BV


def keep_likely(logits_BV: Tensor, limits_B3: Tensor) -> Tensor:
    """The logits, with all tokens at -inf but the likely ones: by min-p (arXiv 2407.01082), then the k likeliest, then
    of these the fewest with probability top_p (arXiv 1904.09751). That is vLLM's order.

    limits_B3: float64, each row's top_p (1: no limit), top_k (0), min_p (0).
    """
    top_p_B1, top_k_B1, min_p_B1 = limits_B3[:, :, None].unbind(1)
    sorted_BV, order_BV = logits_BV.sort(stable=True, dim=-1, descending=True)
    ranks_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    probs_BV = sorted_BV.softmax(-1)
    dropped_BV = (ranks_V >= torch.where(top_k_B1 > 0, top_k_B1, torch.inf)) | (probs_BV < min_p_B1 * probs_BV[:, :1])
    probs_BV = sorted_BV.masked_fill(dropped_BV, -torch.inf).softmax(-1)
    held_before_BV = probs_BV.cumsum(-1, dtype=torch.float64) - probs_BV
    # Rounding must not cut the tail of a row without top-p.
    dropped_BV |= held_before_BV >= torch.where(top_p_B1 < 1, top_p_B1, torch.inf)
    return logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), -torch.inf)


def _invert_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform; never one of probability 0."""
    if probs_BV.shape[1] <= FEW_TOKENS:
        cdf_BV = probs_BV.cumsum(-1, dtype=torch.float64)  # float32 loses the tail of a large vocabulary
        return _first_above(cdf_BV, uniforms_B[:, None] * cdf_BV[:, -1:])[:, 0]
    # First the block of tokens, then the token in it: running sums of all tokens would take longer than all else here.
    blocks_BNK = F.pad(probs_BV, (0, -probs_BV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    ends_BN = blocks_BNK.sum(-1, dtype=torch.float64).cumsum(-1)
    target_B1 = uniforms_B[:, None] * ends_BN[:, -1:]
    block_B1 = _first_above(ends_BN, target_B1)
    begin_B1 = F.pad(ends_BN, (1, 0)).gather(1, block_B1)
    block_BK = blocks_BNK.gather(1, block_B1[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    within_B1 = _first_above(block_BK.cumsum(-1, dtype=torch.float64), target_B1 - begin_B1)
    return (block_B1 * BLOCK + within_B1)[:, 0]


def _first_above(cdf_BN: Tensor, target_B1: Tensor) -> Tensor:
    """[B, 1]: the first place with a larger cumulative probability; the last that has any, if rounding left none."""
    total_B1 = cdf_BN[:, -1:]
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    return torch.searchsorted(cdf_BN, torch.minimum(target_B1, below_B1), right=True)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """An unsigned shift: torch's shift of an int64 keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
