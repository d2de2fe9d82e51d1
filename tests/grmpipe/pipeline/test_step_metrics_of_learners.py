"""Tokens per second and MFU of a learner, by hand."""

from __future__ import annotations

from grmpipe.pipeline.step_metrics import with_pace

LEARNT = {"train/loss": 0.1, "train/packed_tokens": 4000.0, "train/loss_tokens": 3000.0, "perf/model_flops": 6e15}


def test_pace_is_per_second_of_the_learners_own_work() -> None:
    paced = with_pace(LEARNT | {"perf/peak_flops_per_s": 4e15}, 2.5)
    assert paced == LEARNT | {
        "perf/peak_flops_per_s": 4e15, "learner/tokens_per_s": 1600.0, "learner/trained_tokens_per_s": 1200.0,
        "perf/model_flops_per_s": 2.4e15, "perf/mfu": 0.6,
    }  # fmt: skip


def test_a_device_without_a_known_peak_has_no_mfu() -> None:
    assert "perf/mfu" not in with_pace(LEARNT, 2.5)


def test_a_step_without_work_of_the_policys_learner_has_no_pace() -> None:
    assert with_pace(LEARNT, 0.0) == LEARNT
    assert with_pace({"critic/loss": 1.0}, 1.0) == {"critic/loss": 1.0}
