"""The device of a rank, and how ranks meet. Sharding itself is tested with the learner."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from grmpipe.models.lm.parallel.ranks import choose_device, join_ranks
from grmpipe.models.settings import ParallelConfig

CPU = torch.device("cpu")


def gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


def test_without_a_choice_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    assert choose_device("", 3) == CPU
    gpus(monkeypatch, 4)
    assert [choose_device("", rank) for rank in (0, 3)] == [torch.device("cuda", 0), torch.device("cuda", 3)]


def test_chosen_cpu_is_kept_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4)
    assert choose_device("cpu", 1) == CPU


def test_actor_that_sees_one_gpu_uses_it_at_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    assert choose_device("cuda", 5) == torch.device("cuda", 0)


def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match="torch finds no GPU"):
        choose_device("cuda", 0)


def test_two_ranks_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="init_method"):
        join_ranks(0, 2, None, CPU)


def test_ranks_that_do_not_divide_into_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="dp_replicate: 3 copies"):
        ParallelConfig(dp_replicate=3).check_ranks(8)
    with pytest.raises(ValueError, match="ep: 8 doesn't divide the 4 ranks"):
        ParallelConfig(dp_replicate=2, ep=8).check_ranks(8)
    ParallelConfig(dp_replicate=2, cp=2, ep=4).check_ranks(8)
