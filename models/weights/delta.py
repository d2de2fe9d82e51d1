"""Buckets of 16-bit weights as what changed in them since the push before: both ends.

    sender:  fill a bucket, compare it with the last one -> changes, or all bytes -> the transport, as one tensor
    engine:  one tensor -> applied to the bytes that came last -> the bucket, as if it had come whole

Both ends hold the bytes of a whole push in host memory. A step of AdamW changes few values of bfloat16: the gaps
between them, and the differences of their bits, take about 1 % of all bytes (benchmarks/weight_delta.md, which also has
what else was tried).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from grmpipe.models.bucket_memory import BucketMemory, pack
from grmpipe.models.checksum import checksum
from grmpipe.models.types import InlineBytes, WeightBucket, WeightDelta, WeightTensor
from grmpipe.models.weights.checksums import as_bytes
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.transport_ends import CPU, UnshardedBucket, WeightTransport, open_transport, parse_dtype

COUNT_BYTES, CHANGE_BYTES = 8, 4 + 2  # of a change: the gap before it, and its step
MOST_CHANGED = 1 / 4  # of the values; beyond, their places alone take more memory than the bucket


class DeltaSender(WeightTransport):
    """Sends buckets through another transport. is_whole: all bytes of them, whatever was sent before."""

    def __init__(self, transport: str, dtype: str, folder: str = "") -> None:
        super().__init__(dtype, CPU, folder)
        self.is_whole = True
        self._through = open_transport(transport, "uint8", CPU, folder)
        self._arena = BucketMemory(CPU)
        self._last: dict[int, tuple[str, Tensor]] = {}  # by bucket: its identity and bytes, as sent last

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        filled_B, tensors = self._arena.take_packed(self._dtypes(bucket), bucket.shapes)
        self._fill(tensors, bucket)
        base, last_B = self._last.get(index, ("", None))
        changes_B = None if self.is_whole or last_B is None else pack_changes(last_B, filled_B)
        sent_B = filled_B if changes_B is None else changes_B
        packed = UnshardedBucket(names=(f"bucket {index}",), shapes=(tuple(sent_B.shape),), tensors=iter([sent_B]))
        payload = WeightDelta(
            index=index, base="" if changes_B is None else base, packed=self._through.post(index, packed)
        )
        posted = self._announce(bucket, tensors, payload)
        self._last[index] = (identify(posted.tensors), filled_B.clone() if last_B is None else last_B.copy_(filled_B))
        return posted

    def close(self) -> None:
        self._through.close()
        self._last.clear()


class DeltaReceiver:
    """The buckets that an engine received last: what the next changes apply to."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[str, Tensor]] = {}

    def restore(self, bucket: WeightBucket) -> WeightBucket:
        """The bucket with all its bytes, which stay until its next push; any other bucket as it is. Raises ValueError
        for one that arrived damaged, or for changes to other bytes than this engine has: it needs the whole.
        """
        delta = bucket.payload
        if not isinstance(delta, WeightDelta):
            return bucket
        base, bytes_B = self._last.pop(delta.index, ("", None))  # half applied, it would be no base
        with receive_tensors(delta.packed) as received:
            (sent,), (packed_B,) = zip(*received, strict=True)
            if compute_checksums(received) != {sent.name: sent.checksum}:
                raise ValueError(f"weights: {sent.name} arrived damaged, at {bucket.tensors[0].name!r}")
            if not delta.base:
                bytes_B = packed_B.clone() if bytes_B is None else bytes_B.copy_(packed_B)
            elif bytes_B is None or base != delta.base:
                raise ValueError(f"weights: the changes from {bucket.tensors[0].name!r} on apply to another push")
            else:
                apply_changes(bytes_B, packed_B)
        self._last[delta.index] = (identify(bucket.tensors), bytes_B)
        whole = pack(bytes_B, [parse_dtype(tensor) for tensor in bucket.tensors], [t.shape for t in bucket.tensors])
        return replace(bucket, payload=InlineBytes(data=tuple(map(as_bytes, whole))))


def identify(tensors: Sequence[WeightTensor]) -> str:
    """The identity of a bucket's bytes."""
    return checksum("".join(tensor.checksum for tensor in tensors).encode())


def pack_changes(old_B: Tensor, new_B: Tensor) -> Tensor | None:
    """What leads from old bytes of 16-bit values to new ones, compressed; None if too much has changed."""
    from pyarrow import compress

    old_V, new_V = old_B.numpy().view(np.int16), new_B.numpy().view(np.int16)
    changed_V = old_V != new_V
    count = int(np.count_nonzero(changed_V))
    if count > MOST_CHANGED * len(changed_V):
        return None
    place_N = np.flatnonzero(changed_V)  # on one thread half of the time that torch takes
    gap_N = np.diff(place_N, prepend=0).astype(np.int32)
    step_N = new_V[place_N] - old_V[place_N]  # of bits, with wraparound: 1 or -1 to the next value
    packed = compress(_to_planes(gap_N) + _to_planes(step_N), codec="zstd", asbytes=True)
    return torch.frombuffer(bytearray(count.to_bytes(COUNT_BYTES, "little") + packed), dtype=torch.uint8)


def apply_changes(bytes_B: Tensor, packed_B: Tensor) -> None:
    """The other end of `pack_changes`: turns old bytes into new ones in place."""
    from pyarrow import decompress

    data = packed_B.numpy().tobytes()
    count = int.from_bytes(data[:COUNT_BYTES], "little")
    planes_B = np.frombuffer(decompress(data[COUNT_BYTES:], CHANGE_BYTES * count, codec="zstd"), np.uint8)
    gap_N, step_N = _from_planes(planes_B[: 4 * count], np.int32), _from_planes(planes_B[4 * count :], np.int16)
    bytes_B.numpy().view(np.int16)[gap_N.cumsum(dtype=np.int64)] += step_N


def _to_planes(values_N: np.ndarray) -> bytes:
    """The first bytes of all values, then the second ones: alike bytes compress better side by side."""
    return values_N.view(np.uint8).reshape(-1, values_N.itemsize).T.tobytes()


def _from_planes(planes_B: np.ndarray, dtype: type[np.integer]) -> np.ndarray:
    return planes_B.reshape(np.dtype(dtype).itemsize, -1).T.copy().view(dtype).reshape(-1)
