"""Weights within the bucket itself, sent between processes and nodes through the object store: both ends."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grmpipe.models.types import InlineBytes, WeightBucket, WeightTensor
from grmpipe.models.weights.checksums import as_bytes
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transport_ends import UnshardedBucket, WeightTransport, num_bytes, open_bucket, parse_dtype


class ObjectStore(WeightTransport):
    """The bytes are in the bucket, in their own memory, which outlives any step and any later bucket."""

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        dtype = getattr(torch, self._dtype)
        held = [tensor.to("cpu", dtype, copy=True) for tensor in bucket.tensors]
        return self._announce(bucket, held, InlineBytes(data=tuple(as_bytes(tensor) for tensor in held)))


@open_bucket.register
def _(payload: InlineBytes, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> list[Tensor]:
    came = []
    for tensor, data in zip(tensors, payload.data, strict=True):
        if data.nbytes != num_bytes(tensor):
            raise ValueError(
                f"weights: {tensor.name!r} arrived with {data.nbytes} bytes instead of {num_bytes(tensor)}"
            )
        # torch wants writable memory; memory in a shared store may be read-only
        writable = data if data.flags.writeable else data.copy()
        came.append(torch.from_numpy(writable).view(parse_dtype(tensor)).view(tensor.shape))
    return came
