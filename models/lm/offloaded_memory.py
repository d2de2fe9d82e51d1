"""Offloads tensors: frees their device memory while their bytes wait on the host."""

import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from grmpipe.models.bucket_memory import round_up_to_page


class OffloadedMemory:
    """Storages that are empty while they are offloaded, and their bytes on the host.

    The tensor objects stay the same, with their views, their entries in an optimizer and their place in a sharded
    model. They must not be read meanwhile: not every kernel checks for an empty storage.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[UntypedStorage, Tensor]] = []
        self._rooms: dict[torch.device, Tensor] = {}  # kept: pinning memory takes as long as copying it

    @property
    def is_offloaded(self) -> bool:
        return bool(self._lent)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Offload tensors. All tensors that share a storage are offloaded together."""
        assert not self._lent, "lent already"
        storages = _storages(tensors)
        for device in {storage.device for storage in storages}:
            here = [storage for storage in storages if storage.device == device]
            self._lent += zip(here, self._rooms_for(here, device), strict=True)
        for storage, room in self._lent:
            room.copy_(_bytes_of(storage))
        for storage, _ in self._lent:
            storage.resize_(0)

    def load_back(self) -> None:
        """Load every byte back. Does nothing if nothing is offloaded."""
        for storage, room in self._lent:
            storage.resize_(room.numel())
            _bytes_of(storage).copy_(room)
        self._lent = []

    def _rooms_for(self, storages: Sequence[UntypedStorage], device: torch.device) -> list[Tensor]:
        """Memory on the host, in one block: torch rounds pinned memory up to a power of two, and would round each
        piece.

        Pinned for a GPU, so that loading back runs at the speed of the bus.
        """
        sizes = [storage.nbytes() for storage in storages]
        ends = list(accumulate(round_up_to_page(size) for size in sizes))
        whole, block = ends[-1] if ends else 0, self._rooms.get(device)
        if block is None or block.numel() < whole:
            self._rooms.pop(device, None)  # free it before taking more
            block = self._rooms[device] = (
                allocate_pinned(whole) if device.type == "cuda" else torch.empty(whole, dtype=torch.uint8)
            )
        return [block[end - round_up_to_page(size) :][:size] for end, size in zip(ends, sizes, strict=True)]


def allocate_pinned(num_bytes: int) -> Tensor:
    """Host memory, uint8, that a GPU copies from and to directly: of exactly this size, not of the next power of two.

    It is registered with CUDA as pinned, and unregistered when it is no longer referenced.
    """
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes:
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0)))
        weakref.finalize(block.untyped_storage(), cudart.cudaHostUnregister, block.data_ptr())
    return block


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def free_bytes(device: torch.device) -> int:
    """The free bytes of a GPU now, for any process. 0 for a CPU, where nothing is offloaded."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each storage once; for sharded tensors that of the local shard."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    by_address = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in local if tensor.numel()}
    return list(by_address.values())
