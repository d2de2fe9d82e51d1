"""Weights in the memory of a GPU shared by learner and engine, mapped by the engine (CUDA IPC): both ends."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from grmpipe.models.bucket_memory import BucketMemory
from grmpipe.models.types import CudaHandle, CudaHandles, WeightBucket, WeightTensor
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transport_ends import CPU, UnshardedBucket, WeightTransport, open_bucket


class CudaMemory(WeightTransport):
    """Two buffers on this rank's GPU that engines on the same GPU map."""

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        if device.type != "cuda":
            raise ValueError(
                f"sync.transport: cuda_ipc shares a GPU's memory, but the learner is on {device}; set shared_memory"
            )
        self._arenas = tuple(BucketMemory(device) for _ in range(2))

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        self._arenas = self._arenas[::-1]
        sent = self._arenas[0].take(self._dtypes(bucket), bucket.shapes)
        self._fill(sent, bucket)
        torch.cuda.synchronize(self._device)  # another process reads it next
        handles = tuple(make_handle(tensor) for tensor in sent)
        return self._announce(bucket, sent, CudaHandles(handles={gpu_id(self._device): handles}))


@open_bucket.register
def _(payload: CudaHandles, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> list[Tensor]:
    """The tensors on the GPU that this process sees. Raises ValueError if the handles are for another GPU."""
    for device in gpus_seen():
        if (own := payload.handles.get(gpu_id(device))) is not None:
            return [map_handle(handle, device) for handle in own]
    raise ValueError(
        f"sync.transport: cuda_ipc is for engines on the learner's GPUs ({', '.join(payload.handles)}); this engine "
        "sees none of them: set sync.transport=auto"
    )


def gpu_id(device: torch.device | int) -> str:
    """The GPU's uuid, the same in all processes; each process numbers the GPUs that it sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpus_seen() -> range:
    return range(torch.cuda.device_count())


def make_handle(tensor: Tensor) -> CudaHandle:
    """The handle of a contiguous tensor, as torch's `reduce_tensor` shares it."""
    assert tensor.is_contiguous() and not tensor.requires_grad
    _, _, _, offset, _, _, _, memory, size, start, _, counter, counter_offset, event, sync = reduce_tensor(tensor)[1]
    return CudaHandle(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        offset=offset,
        memory=memory or b"",
        storage_bytes=size,
        storage_offset_bytes=start,
        ref_counter=counter or b"",
        ref_counter_offset=counter_offset,
        event=event or b"",
        event_sync_required=bool(sync),
    )


def map_handle(handle: CudaHandle, device: int) -> Tensor:
    """The sender's tensor itself, on the device number that this process gives the GPU."""
    dtype: torch.dtype = getattr(torch, handle.dtype)
    shape = torch.Size(handle.shape)
    tensor: Tensor = rebuild_cuda_tensor(
        Tensor,
        shape,
        torch.empty(shape, device="meta").stride(),
        handle.offset,
        TypedStorage,
        dtype,
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
    return tensor
