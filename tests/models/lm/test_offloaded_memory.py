"""Offloaded memory is really freed, and every byte is loaded back to its place."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from grmpipe.models.lm.offloaded_memory import OffloadedMemory, allocate_pinned, free_bytes


def test_tensors_and_their_views_are_empty_while_lent_and_whole_afterwards() -> None:
    whole = torch.arange(12, dtype=torch.float32)
    part, copy = whole[4:8], whole.clone()
    memory = OffloadedMemory()
    memory.offload([part])
    assert (memory.is_offloaded, whole.untyped_storage().nbytes()) == (True, 0)
    memory.load_back()
    assert not memory.is_offloaded
    assert torch.equal(whole, copy)
    assert part.data_ptr() == whole[4:].data_ptr(), "a view of something else"


def test_optimizer_continues_unchanged_after_its_memory_was_offloaded() -> None:
    def trained(lends: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        memory = OffloadedMemory()
        for _ in range(3):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if lends:
                memory.offload(
                    [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
                )
                assert model.weight.untyped_storage().nbytes() == 0
                memory.load_back()
        return model.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_tied_weights_are_lent_once() -> None:
    table = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = table.weight
    before = table.weight.detach().clone()
    memory = OffloadedMemory()
    memory.offload([table.weight, head.weight])
    memory.load_back()
    assert torch.equal(head.weight, before)


def test_a_cpu_has_nothing_to_lend() -> None:
    assert free_bytes(torch.device("cpu")) == 0


def test_all_that_is_lent_lies_in_one_block_of_its_size_which_is_used_again() -> None:
    tensors = [torch.rand(size) for size in (3, 65, 1000)]
    before = [tensor.clone() for tensor in tensors]
    memory, blocks = OffloadedMemory(), set()
    for _ in range(2):
        memory.offload(tensors)
        (block,) = memory._rooms.values()
        blocks.add(block.data_ptr())
        assert block.numel() == 64 + 320 + 4032, "each piece at the next multiple of 64 bytes"
        memory.load_back()
    assert len(blocks) == 1
    assert all(map(torch.equal, tensors, before))


def test_pinned_memory_is_registered_with_cuda_as_large_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the next power of two, as with torch's own allocator."""

    class Cudart:
        registered: ClassVar[dict[int, int]] = {}

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            self.registered[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            del self.registered[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    block = allocate_pinned(1000)
    assert Cudart.registered == {block.data_ptr(): 1000}
    view = block[100:]
    del block
    assert len(Cudart.registered) == 1, "a view still needs it"
    del view
    assert Cudart.registered == {}
