"""Ways for a bucket's bytes to leave the learner. Knows neither their model nor the engines that take them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.arena import Arena, room_for, views
from models.types import (
    Broadcast,
    CudaHandles,
    GroupLink,
    InlineBytes,
    Payload,
    SafetensorsFile,
    SharedMemory,
    WeightBucket,
    WeightTensor,
)
from models.weights.checksums import as_bytes, tensor_checksums
from models.weights.gpu_handles import gpu_id, handles_of
from models.weights.process_group import BroadcastGroup
from models.weights.stream import UnshardedBucket
from models.weights.weight_files import SharedArena, WeightFile, folders_of_shared_memory, sweep

CPU = torch.device("cpu")


class WeightTransport(ABC):
    """A sending rank's end. Two buckets are alive at most: the last one posted, and the one before it, still loaded."""

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        """dtype: as tensors travel. device: where the learner's weights are. folder: for those that need one."""
        self._dtype = dtype
        self._device = device
        self._folder = folder

    @abstractmethod
    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        """Take all tensors of a bucket, cast them, say where they are."""

    # What only broadcasts need.
    def connect(self, link: GroupLink | None) -> None:  # noqa: B027
        """Join the group of the receivers as its sender; leave an older one, or (None) any."""

    def deliver(self, index: int) -> None:  # noqa: B027
        """Send what was posted, while the receivers load it."""

    def close(self) -> None:  # noqa: B027
        """Give back memory and files, groups too."""

    def _fill(self, targets: Sequence[Tensor], bucket: UnshardedBucket) -> None:
        """Cast and copy in one go, straight from the parameters where they are whole."""
        for target, tensor in zip(targets, bucket.tensors, strict=True):
            target.copy_(tensor)

    def _announce(self, bucket: UnshardedBucket, sent: Sequence[Tensor], payload: Payload) -> WeightBucket:
        """The bucket as receivers hear of it; `sent` are its tensors as they travel."""
        tensors = (
            WeightTensor(name=name, dtype=self._dtype, shape=shape, checksum=checksum)
            for name, shape, checksum in zip(bucket.names, bucket.shapes, tensor_checksums(sent), strict=True)
        )
        return WeightBucket(tensors=tuple(tensors), payload=payload)

    def _dtypes(self, bucket: UnshardedBucket) -> list[torch.dtype]:
        return [getattr(torch, self._dtype)] * len(bucket.names)


class ObjectStore(WeightTransport):
    """The bytes travel within the bucket, in memory of its own: it outlives any step and any later bucket."""

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        dtype = getattr(torch, self._dtype)
        held = [tensor.to("cpu", dtype, copy=True) for tensor in bucket.tensors]
        return self._announce(bucket, held, InlineBytes(data=tuple(as_bytes(tensor) for tensor in held)))


class SharedMemoryFiles(WeightTransport):
    """Two files in this machine's memory, filled in turn. They stay mapped: only the first push touches new pages."""

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        for place in folders_of_shared_memory():
            sweep(place)
        self._next, self._other = SharedArena(), SharedArena()

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        slot = self._next
        self._next, self._other = self._other, self._next
        dtypes = self._dtypes(bucket)
        sent = views(slot.reserve(room_for(dtypes, bucket.shapes)), dtypes, bucket.shapes)
        self._fill(sent, bucket)
        return self._announce(bucket, sent, SharedMemory(path=slot.path))

    def close(self) -> None:
        self._next.close()
        self._other.close()


class SafetensorsFiles(WeightTransport):
    """Two files in a folder that every engine can open, written in turn."""

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        if not folder:
            raise ValueError("sync.transport: disk needs a folder that learner and engines can open; give sync_dir")
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        sweep(place)
        self._next, self._other = (WeightFile(place, ".safetensors") for _ in range(2))
        self._arena = Arena(CPU)

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        file = self._next
        self._next, self._other = self._other, self._next
        sent = self._arena.take(self._dtypes(bucket), bucket.shapes)
        self._fill(sent, bucket)
        save_file(dict(zip(bucket.names, sent, strict=True)), file.path)
        return self._announce(bucket, sent, SafetensorsFile(path=str(file.path)))

    def close(self) -> None:
        self._next.close()
        self._other.close()


class Broadcasts(WeightTransport):
    """Rank 0 of a process group sends what it posted: over sockets (gloo) or between GPUs (nccl)."""

    def __init__(self, dtype: str, device: torch.device, backend: str) -> None:
        super().__init__(dtype, device)
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"sync.transport: nccl sends from a GPU, but the learner is on {device}; set gloo")
        self._backend = backend
        self._group = BroadcastGroup(device)
        self._arenas = tuple(Arena(device if backend == "nccl" else CPU) for _ in range(2))
        self._posted: dict[int, tuple[tuple[str, ...], list[Tensor]]] = {}  # the last two

    def connect(self, link: GroupLink | None) -> None:
        if link is not None and link.backend != self._backend:
            raise ValueError(
                f"sync.transport: the learner sends by {self._backend}, but the group is for {link.backend}"
            )
        self._group.join(link)

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        while len(self._posted) > 1:
            del self._posted[next(iter(self._posted))]
        self._arenas = self._arenas[::-1]
        sent = self._arenas[0].take(self._dtypes(bucket), bucket.shapes)
        self._fill(sent, bucket)
        self._posted[index] = (bucket.names, sent)
        return self._announce(bucket, sent, Broadcast())

    def deliver(self, index: int) -> None:
        """Raises ConnectionError naming the tensor where a receiver is gone, or hangs for the link's timeout."""
        names, sent = self._posted[index]
        self._group.send(names, sent)

    def close(self) -> None:
        self._group.leave()
        self._posted.clear()


class CudaMemory(WeightTransport):
    """Two stretches of this rank's GPU that engines on the same GPU map."""

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        if device.type != "cuda":
            raise ValueError(
                f"sync.transport: cuda_ipc shares a GPU's memory, but the learner is on {device}; set shared_memory"
            )
        self._arenas = tuple(Arena(device) for _ in range(2))

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        self._arenas = self._arenas[::-1]
        sent = self._arenas[0].take(self._dtypes(bucket), bucket.shapes)
        self._fill(sent, bucket)
        torch.cuda.synchronize(self._device)  # another process reads it next
        return self._announce(bucket, sent, CudaHandles(handles={gpu_id(self._device): handles_of(sent)}))


# Every rank sends, to the engines on its own GPU: each has every tensor whole anyway. In all other ways rank 0 does.
FROM_EVERY_RANK = ("cuda_ipc",)

# (dtype, the learner's device, folder) -> a sending end. A new way is a class and a row here, a payload in types.py and
# and a case in `received`.
TRANSPORTS: dict[str, Callable[[str, torch.device, str], WeightTransport]] = {
    "object_store": ObjectStore,
    "shared_memory": SharedMemoryFiles,
    "disk": SafetensorsFiles,
    "gloo": lambda dtype, device, folder: Broadcasts(dtype, device, "gloo"),
    "nccl": lambda dtype, device, folder: Broadcasts(dtype, device, "nccl"),
    "cuda_ipc": CudaMemory,
}
