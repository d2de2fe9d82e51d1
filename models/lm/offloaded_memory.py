"""Memory of tensors, given back to a device for a time: their bytes wait on the host. Knows no model and no engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from models.arena import padded


class OffloadedMemory:
    """Storages that are empty while they are lent, and the bytes that go back into them.

    The tensors themselves stay what they are, with their views, their names in an optimizer and their place in a
    sharded model. Nobody may read one meanwhile: not every kernel looks whether there is anything to read.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[UntypedStorage, Tensor]] = []
        self._rooms: dict[torch.device, Tensor] = {}  # kept: to pin memory takes as long as to copy it

    @property
    def is_offloaded(self) -> bool:
        return bool(self._lent)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that share a storage are lent together, whichever of them are named."""
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
        """Every byte as it was. Nothing where nothing is lent."""
        for storage, room in self._lent:
            storage.resize_(room.numel())
            _bytes_of(storage).copy_(room)
        self._lent = []

    def _rooms_for(self, storages: Sequence[UntypedStorage], device: torch.device) -> list[Tensor]:
        """On the host, in one block: torch rounds what it pins up to a power of two, and would each piece.

        Pinned where it comes from a GPU: the way back is as fast as the bus."""
        sizes = [storage.nbytes() for storage in storages]
        ends = list(accumulate(padded(size) for size in sizes))
        whole, block = ends[-1] if ends else 0, self._rooms.get(device)
        if block is None or block.numel() < whole:
            self._rooms.pop(device, None)  # give back before taking more
            block = self._rooms[device] = (
                pinned(whole) if device.type == "cuda" else torch.empty(whole, dtype=torch.uint8)
            )
        return [block[end - padded(size) :][:size] for end, size in zip(ends, sizes, strict=True)]


def pinned(num_bytes: int) -> Tensor:
    """Memory of the host, uint8, that a GPU copies from and to directly: of this size, not of the next power of two.

    It is registered with CUDA, in whose eyes it is pinned, and unregistered when nobody holds it any more.
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
    """What a GPU has to give at this moment, to whichever process asks. 0 of a CPU: there nothing is lent."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each once, with those of a sharded tensor's own shard."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    by_address = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in local if tensor.numel()}
    return list(by_address.values())
