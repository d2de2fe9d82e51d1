"""The memory of a cache on a CPU: what its rows have written, not the room that it made for them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from grmpipe.models.engines.embedded.kv_slots import KvShape, KvSlots


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_room_takes_no_memory_before_it_is_written_and_is_zero() -> None:
    shape = KvShape(num_layers=2, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16, device=torch.device("cpu"))
    slots = KvSlots(shape, max_rows=8, max_tokens=1 << 16)
    before = resident_bytes()
    slots.reserve(8, 1 << 16)
    assert slots.kv_NRT2GD.nbytes == 2 * 8 * (1 << 16) * 2 * 4 * 64 * 2  # 1.07 GB
    keys_and_values_PC = torch.ones(3, 2 * 4 * 64, dtype=torch.bfloat16)
    slots.write(1, torch.tensor([0, 1, (5 << 16) + 7]), keys_and_values_PC)
    assert resident_bytes() - before < 50e6
    keys_RGTD, values_RGTD = slots.read(1, slice(0, 6), 8)
    assert keys_RGTD.sum() == values_RGTD.sum() == 3 * 4 * 64
    assert slots.give_up() == 2 * 8 * (1 << 16) * 2 * 4 * 64 * 2
