"""Whole runs on vLLM: policy and judge, alone and next to the embedded engine. Real, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.vllm


ON_VLLM = ("engine=vllm", "engine.vllm.kv_cache_mb=32", "judge.format.structured=true", "judge.temperature=2")


def test_policy_and_judge_on_vllm_train_and_every_judgement_keeps_its_form(small_run: Callable) -> None:
    files = small_run(*ON_VLLM, "train.max_staleness=0")
    summary = files.summary
    assert (summary["status"], summary["versions"]["policy"]) == ("completed", 3)
    assert summary["judging"]["counted"] > 0
    assert set(summary["judging"]["failed"]) <= {"truncated"}, "at T = 2 a free judge garbles some"
    assert all(step["mismatch/age_0/max_nats"] < 1e-3 for step in files.steps() if "mismatch/age_0/max_nats" in step)
    shares = [sum(value for name, value in step.items() if name.endswith("/token_share")) for step in files.steps()]
    assert shares == pytest.approx([1.0] * 3)


@pytest.mark.long
def test_a_mixed_run_has_its_policy_on_vllm_and_its_judge_embedded(small_run: Callable) -> None:
    files = small_run("policy.engine=vllm", "engine.vllm.kv_cache_mb=32", "train.num_steps=2")
    assert files.summary["status"] == "completed"
    assert files.summary["judging"]["counted"] > 0
