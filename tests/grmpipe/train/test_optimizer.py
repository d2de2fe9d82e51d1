"""Learning rates by step."""

from __future__ import annotations

import pytest

from grmpipe.config.train import TrainConfig
from grmpipe.train.optimizer import schedule_lr


def rates(schedule: str) -> list[float]:
    config = TrainConfig(num_steps=6, warmup_steps=2, lr=3.0, schedule=schedule)
    return [schedule_lr(step, config) for step in range(7)]


def test_warm_up_then_constant() -> None:
    assert rates("constant") == pytest.approx([1, 2, 3, 3, 3, 3, 3])


def test_linear_decay_learns_on_the_last_step() -> None:
    assert rates("linear") == pytest.approx([1, 2, 3, 2.25, 1.5, 0.75, 0])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates("cosine")[4] == pytest.approx(1.5)
    assert sorted(rates("cosine")[2:], reverse=True) == rates("cosine")[2:]


def test_no_warm_up_starts_at_full_rate() -> None:
    assert schedule_lr(0, TrainConfig(warmup_steps=0, lr=0.5)) == 0.5


def test_several_updates_warm_up_within_the_same_batches() -> None:
    config = TrainConfig(num_steps=6, warmup_steps=2, lr=3.0)
    assert [schedule_lr(step / 2, config) for step in range(6)] == pytest.approx([1, 1.5, 2, 2.5, 3, 3])
