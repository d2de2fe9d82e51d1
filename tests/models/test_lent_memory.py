"""Lent memory is really given up, and every byte comes back to where it was."""

from __future__ import annotations

import torch
from torch import nn

from models.lent_memory import LentMemory, free_bytes


def test_tensors_and_their_views_are_empty_while_lent_and_whole_afterwards() -> None:
    whole = torch.arange(12, dtype=torch.float32)
    part, copy = whole[4:8], whole.clone()
    memory = LentMemory()
    memory.lend([part])
    assert (memory.is_lent, whole.untyped_storage().nbytes()) == (True, 0)
    memory.take_back()
    assert not memory.is_lent
    assert torch.equal(whole, copy)
    assert part.data_ptr() == whole[4:].data_ptr(), "a view of something else"


def test_an_optimizer_goes_on_after_its_state_and_weights_were_lent_as_if_they_had_not_been() -> None:
    def trained(lends: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        memory = LentMemory()
        for _ in range(3):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if lends:
                memory.lend([*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())])
                assert model.weight.untyped_storage().nbytes() == 0
                memory.take_back()
        return model.weight.detach()

    assert torch.equal(trained(True), trained(False))


def test_tied_weights_are_lent_once() -> None:
    table = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = table.weight
    before = table.weight.detach().clone()
    memory = LentMemory()
    memory.lend([table.weight, head.weight])
    memory.take_back()
    assert torch.equal(head.weight, before)


def test_a_cpu_has_nothing_to_lend() -> None:
    assert free_bytes(torch.device("cpu")) == 0
