"""Memory of tensors, given back to a device for a time: their bytes wait on the host. Knows no model and no engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class LentMemory:
    """Storages that are empty while they are lent, and the bytes that go back into them.

    The tensors themselves stay what they are, with their views, their names in an optimizer and their place in a
    sharded model. Nobody may read one meanwhile: not every kernel looks whether there is anything to read.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[UntypedStorage, Tensor]] = []
        self._rooms: dict[int, Tensor] = {}  # by storage, kept: to pin memory takes as long as to copy it

    @property
    def is_lent(self) -> bool:
        return bool(self._lent)

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that share a storage are lent together, whichever of them are named."""
        assert not self._lent, "lent already"
        self._lent = [(storage, self._on_host(storage)) for storage in _storages(tensors)]
        self._rooms = {storage._cdata: room for storage, room in self._lent}
        for storage, _ in self._lent:
            storage.resize_(0)

    def take_back(self) -> None:
        """Every byte as it was. Nothing where nothing is lent."""
        for storage, room in self._lent:
            storage.resize_(room.untyped_storage().nbytes())
            storage.copy_(room.untyped_storage(), non_blocking=False)
        self._lent = []

    def _on_host(self, storage: UntypedStorage) -> Tensor:
        """Pinned where it comes from a GPU: the way back is as fast as the bus."""
        room = self._rooms.get(storage._cdata)
        if room is None or room.untyped_storage().nbytes() != storage.nbytes():
            room = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
        room.untyped_storage().copy_(storage, non_blocking=False)
        return room


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
