"""Checksums computed where the bytes are: any change shows, and all devices give the same."""

from __future__ import annotations

import pytest
import torch

from grmpipe.models.weights import checksums
from grmpipe.models.weights.checksums import ON_DEVICE, device_checksums


def one(tensor: torch.Tensor) -> str:
    return device_checksums([tensor])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_equal_bytes_have_equal_sums_and_a_step_of_bfloat16_shows(dtype: torch.dtype) -> None:
    tensor = (torch.arange(1001) % 101).to(dtype)
    assert one(tensor) == one(tensor.clone()) and one(tensor).startswith(ON_DEVICE)
    for place in (0, 500, 1000):
        changed = tensor.clone()
        changed.view(torch.uint8)[place * tensor.element_size()] ^= 1
        assert one(changed) != one(tensor)


def test_a_swap_a_shift_and_another_length_show() -> None:
    tensor = torch.randn(64, 64)
    sums = {
        one(tensor),
        one(tensor.T),
        one(tensor.flip(0)),
        one(tensor.roll(1)),
        one(torch.cat([tensor, tensor[:1] * 0])),
    }
    assert len(sums) == 5
    assert len({one(torch.zeros(size)) for size in range(40)}) == 40


def test_the_sum_is_of_the_elements_in_order_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_B = torch.randint(0, 256, (8001,), dtype=torch.uint8)
    odd = memory_B[3:].clone()
    assert one(memory_B[3:]) == one(odd)
    turned = torch.randn(3, 5).T
    assert one(turned) == one(turned.contiguous())
    whole = one(odd)
    monkeypatch.setattr(checksums, "PIECE_WORDS", 7)
    assert one(odd) == whole


def test_many_tensors_have_the_sums_that_each_has_alone() -> None:
    tensors = [torch.randn(n) for n in (0, 1, 3, 100)]
    assert device_checksums(tensors) == [one(tensor) for tensor in tensors]
    assert device_checksums([]) == []


def test_sums_are_those_of_earlier_versions_and_tensors_share_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of a push may have other versions: an engine on another machine."""
    tensors = [torch.arange(n, dtype=torch.bfloat16) for n in (0, 3, 4, 1000)] * 25
    expected = [
        "device-0000000000000000",
        "device-ad8f75698b52cfd6",
        "device-fabeb062f4d2cfd8",
        "device-71a083a139e954dd",
    ] * 25
    assert device_checksums(tensors) == expected
    for size in (1, 7, 100):
        monkeypatch.setattr(checksums, "PIECE_WORDS", size)
        assert device_checksums(tensors) == expected
    monkeypatch.undo()
    calls: list[int] = []
    for some in (tensors[4:8], tensors):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            device_checksums(some)
        calls.append(sum(event.count for event in profile.key_averages() if event.key in ("aten::mul_", "aten::sum")))
    assert calls == [3, 3], "not by tensor"
