"""Sums and means within the sequences of a loss. Pure. T: its tokens, sequence by sequence, S: sequences.

A sequence is a rollout: all its tokens, whatever the number of samples that it was trained in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sum_by_sequence(values_T: Tensor, sequence_lengths_S: Tensor) -> Tensor:
    """Sums by sequence, [S]. Each is added separately: the packing changes no bit."""
    import torch  # late: what imports this file to name a loss needs none

    return torch.stack([values.sum() for values in values_T.split(sequence_lengths_S.tolist())])


def mean_by_sequence(values_T: Tensor, loss_mask_T: Tensor, sequence_lengths_S: Tensor) -> Tensor:
    """Means by sequence over trained tokens, [S]; 0 for a sequence without any."""
    trained_S = sum_by_sequence(loss_mask_T, sequence_lengths_S)
    return sum_by_sequence(values_T * loss_mask_T, sequence_lengths_S) / trained_S.clamp(min=1)


def to_tokens(values_S: Tensor, sequence_lengths_S: Tensor) -> Tensor:
    """Each token gets its sequence's value, [T]."""
    return values_S.repeat_interleave(sequence_lengths_S)
