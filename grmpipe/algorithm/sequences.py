"""Sums and means within the samples of a packed batch. Pure. T: packed tokens, S: samples."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by_sample(values_T: Tensor, sample_lengths_S: Tensor) -> Tensor:
    """Sums by sample, [S]. Each sample is added separately: the packing changes no bit."""
    return torch.stack([values.sum() for values in values_T.split(sample_lengths_S.tolist())])


def mean_by_sample(values_T: Tensor, loss_mask_T: Tensor, sample_lengths_S: Tensor) -> Tensor:
    """Means by sample over trained tokens, [S]; 0 for a sample without any."""
    trained_S = sum_by_sample(loss_mask_T, sample_lengths_S)
    return sum_by_sample(values_T * loss_mask_T, sample_lengths_S) / trained_S.clamp(min=1)


def to_tokens(values_S: Tensor, sample_lengths_S: Tensor) -> Tensor:
    """Each token gets its sample's value, [T]."""
    return values_S.repeat_interleave(sample_lengths_S)
