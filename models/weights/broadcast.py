"""Weights sent by rank 0 of a process group, over sockets (gloo) or between GPUs (nccl): both ends."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from grmpipe.models.bucket_memory import BucketMemory
from grmpipe.models.types import Broadcast, GroupBackend, GroupLink, WeightBucket, WeightTensor
from grmpipe.models.weights.process_group import BroadcastLink, read_published
from grmpipe.models.weights.transport_ends import CPU, UnshardedBucket, WeightTransport, open_bucket, parse_dtype


class GlooBroadcasts(WeightTransport):
    """Rank 0 of a process group sends each posted bucket in one broadcast, from the host's memory."""

    backend: ClassVar[GroupBackend] = "gloo"

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        self._group = BroadcastLink(device)
        self._arenas = tuple(BucketMemory(self._posted_on(device)) for _ in range(2))
        self._posted: dict[int, tuple[tuple[str, ...], Tensor]] = {}  # the names and bytes of the last two

    def connect(self, link: GroupLink | None) -> None:
        if link is not None and link.backend != self.backend:
            raise ValueError(f"sync.transport: the learner sends by {self.backend}, the group is for {link.backend}")
        self._group.join(link)

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        while len(self._posted) > 1:
            del self._posted[next(iter(self._posted))]
        self._arenas = self._arenas[::-1]
        packed_B, sent = self._arenas[0].take_packed(self._dtypes(bucket), bucket.shapes)
        self._fill(sent, bucket)
        self._posted[index] = (bucket.names, packed_B)
        return self._announce(bucket, sent, Broadcast())

    def deliver(self, index: int) -> None:
        """Raises ConnectionError that names the bucket's tensors if a receiver is gone or hangs."""
        names, packed_B = self._posted[index]
        self._group.send(names, packed_B)

    def publish(self, checksums: Mapping[str, str], version: int) -> None:
        self._group.publish(version, msgspec.json.encode(checksums).decode())

    def close(self) -> None:
        self._group.leave()
        self._posted.clear()

    def _posted_on(self, device: torch.device) -> torch.device:
        return CPU


class NcclBroadcasts(GlooBroadcasts):
    """The same, from the memory of the learner's GPU. On a stream of its own, or the next bucket would wait for it."""

    backend = "nccl"

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        self._stream = torch.cuda.Stream(device)
        self._filled: dict[int, torch.cuda.Event] = {}

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        posted = super().post(index, bucket)
        self._filled = {kept: event for kept, event in self._filled.items() if kept in self._posted}
        self._filled[index] = torch.cuda.current_stream(self._device).record_event()
        return posted

    def deliver(self, index: int) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._filled[index])
            super().deliver(index)
            self._stream.synchronize()  # the memory is filled again on another stream

    def _posted_on(self, device: torch.device) -> torch.device:
        if device.type != "cuda":
            raise ValueError(f"sync.transport: nccl sends from a GPU, but the learner is on {device}; set gloo")
        return device


def read_checksums(link: GroupLink, version: int) -> dict[str, str]:
    """The checksums that the sender published. For a process that isn't in the group itself, as next to an SGLang
    server. Raises ConnectionError.
    """
    return msgspec.json.decode(read_published(link, version), type=dict[str, str])


@open_bucket.register
def _(payload: Broadcast, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> list[Tensor]:
    if group is None:
        raise ConnectionError("weights: a bucket comes by broadcast, but this engine has no process group")
    names, shapes = [tensor.name for tensor in tensors], [tensor.shape for tensor in tensors]
    return group.receive(names, [parse_dtype(tensor) for tensor in tensors], shapes)
