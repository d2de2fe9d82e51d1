"""Weights in the memory of a GPU shared by learner and engine, mapped by the engine (CUDA IPC): both ends."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from grmpipe.models.bucket_memory import BucketMemory, views
from grmpipe.models.types import CudaHandle, CudaHandles, WeightBucket, WeightTensor
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transport_ends import CPU, UnshardedBucket, WeightTransport, open_bucket, parse_dtype


class CudaMemory(WeightTransport):
    """Two buffers on this rank's GPU that engines on the same GPU map."""

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        if device.type != "cuda":
            raise ValueError(
                f"sync.transport: cuda_ipc shares a GPU's memory, but the learner is on {device}; set shared_memory"
            )
        self._arenas = tuple(SharedMemoryOfGpu(device) for _ in range(2))

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        self._arenas = self._arenas[::-1]
        sent = self._arenas[0].take(self._dtypes(bucket), bucket.shapes)
        self._fill(sent, bucket)
        torch.cuda.synchronize(self._device)  # another process reads it next
        handle = self._arenas[0].handle
        return self._announce(bucket, sent, CudaHandles(handles={gpu_id(self._device): handle}))


class SharedMemoryOfGpu(BucketMemory):
    """Memory whose handle is made once: torch wraps a storage into one more owner each time that it is shared, and a
    run has thousands of buckets.
    """

    _shared: tuple[weakref.ref[Tensor], CudaHandle] | None = None

    @property
    def handle(self) -> CudaHandle:
        """The handle of `memory_B`. The memory stays as long as this object, whatever its readers count."""
        if self._shared is None or self._shared[0]() is not self.memory_B:
            self._shared = weakref.ref(self.memory_B), make_handle(self.memory_B)
        return self._shared[1]


@open_bucket.register
def _(payload: CudaHandles, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> list[Tensor]:
    """The tensors on the GPU that this process sees. Raises ValueError if the handles are for another GPU."""
    for device in gpus_seen():
        if (own := payload.handles.get(gpu_id(device))) is not None:
            dtypes, shapes = [parse_dtype(tensor) for tensor in tensors], [tensor.shape for tensor in tensors]
            return views(map_handle(own, device), dtypes, shapes)
    raise ValueError(
        f"sync.transport: cuda_ipc is for engines on the learner's GPUs ({', '.join(payload.handles)}); this engine "
        "sees none of them: set sync.transport=auto"
    )


def gpu_id(device: torch.device | int) -> str:
    """The GPU's uuid, the same in all processes; each process numbers the GPUs that it sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpus_seen() -> range:
    return range(torch.cuda.device_count())


def make_handle(memory_B: Tensor) -> CudaHandle:
    """The handle of a whole storage, uint8, as torch's `reduce_tensor` shares it."""
    assert memory_B.dtype is torch.uint8 and memory_B.nbytes == memory_B.untyped_storage().nbytes()
    _, _, _, _, _, _, _, memory, size, start, _, counter, counter_offset, event, sync = reduce_tensor(memory_B)[1]
    return CudaHandle(
        memory=memory or b"",
        storage_bytes=size,
        storage_offset_bytes=start,
        ref_counter=counter or b"",
        ref_counter_offset=counter_offset,
        event=event or b"",
        event_sync_required=bool(sync),
    )


def map_handle(handle: CudaHandle, device: int) -> Tensor:
    """The sender's memory itself, uint8, on the device number that this process gives the GPU."""
    memory_B: Tensor = rebuild_cuda_tensor(
        Tensor,
        torch.Size((handle.storage_bytes,)),
        (1,),
        0,
        TypedStorage,
        torch.uint8,
        device,
        handle.memory or None,
        handle.storage_bytes,
        handle.storage_offset_bytes,
        False,
        handle.ref_counter,
        handle.ref_counter_offset,
        handle.event,
        handle.event_sync_required,
    )
    return memory_B
