"""The function that turns a bucket's payload into tensors. Each transport's file registers its own implementation.

@opened.register
def _(payload: Pigeon, tensors: Sequence[WeightTensor], group: BroadcastGroup | None) -> Sequence[Tensor]: ...
"""

from collections.abc import Sequence
from functools import singledispatch

import torch
from torch import Tensor

from grmpipe.models.bucket_memory import count_bytes
from grmpipe.models.types import ModelFiles, Payload, WeightTensor
from grmpipe.models.weights.process_group import BroadcastLink


@singledispatch
def open_bucket(
    payload: Payload, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None
) -> Sequence[Tensor]:
    """The tensors of a bucket, in order, on the CPU or their device. Read them before the sender makes its second next
    bucket.

    Raises ValueError that names a tensor that can't be read, ConnectionError if a broadcast broke off.
    """
    raise ValueError(f"weights: no transport here takes {type(payload).__name__}")


@open_bucket.register
def _(payload: ModelFiles, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> Sequence[Tensor]:
    raise ValueError(f"weights: {payload.path} is for engines that read model files themselves")


def num_bytes(tensor: WeightTensor) -> int:
    """The bytes of one tensor, unsharded, as sent."""
    return count_bytes(parse_dtype(tensor), tensor.shape)


def parse_dtype(tensor: WeightTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype
