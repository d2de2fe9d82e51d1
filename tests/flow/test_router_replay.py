"""Whole runs of a mixture of experts with router replay; and what can't be replayed is reported before a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe.config.run_config import ConfigError
from grmpipe.tiny.resolve import SHIPPED
from grmpipe.tiny.upcycle import upcycle

MORE_UPDATES = "algorithm.updates_per_batch=2"


@pytest.fixture(scope="module")
def mixture_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mixture")
    upcycle(SHIPPED / "policy", path, noise=0.3)
    return str(path)


@pytest.mark.parametrize(
    ("replay", "more"),
    [("rollout", ("policy.dtype=bfloat16",)), ("old_logprobs", (MORE_UPDATES, "train.lr=3e-3"))],
)
def test_a_mixture_trains_on_the_experts_that_were_chosen_before(
    small_run: Callable, mixture_path: str, replay: str, more: tuple[str, ...]
) -> None:
    """The probe confirms every push of its weights, and its routers would sometimes choose otherwise now."""
    overrides = (f"policy.path={mixture_path}", f"algorithm.router_replay={replay}", "judge=rule", "train.num_steps=2")
    files = small_run(*overrides, *more, "data.num_eval_prompts=4")
    assert files.summary["status"] == "completed" and files.summary["versions"]["policy"] == 2
    steps = files.steps()
    assert any(0 < step["train/rerouted_share"] < 0.2 for step in steps)
    if replay == "rollout":  # the other replay leaves sampler and learner as different as staleness makes them
        assert all(step["mismatch/mean_nats"] < 0.05 for step in steps)
    assert "experts" not in (files.run_dir / "rollouts.jsonl").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.router_replay=rollout",), r"^algorithm\.router_replay: Qwen3ForCausalLM has no router"),
        (("algorithm.router_replay=old_logprobs", MORE_UPDATES), r"^algorithm\.router_replay: Qwen3ForCausalLM"),
        (("algorithm.router_replay=old_logprobs",), r"^algorithm\.router_replay: .*type algorithm\.updates_per"),
        (("algorithm.router_replay=r3",), r"^algorithm\.router_replay: unknown value 'r3'"),
    ],
)
def test_a_replay_of_routes_that_cant_work_is_refused_with_the_way_out(
    small_run: Callable, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        small_run(*overrides, "judge=rule")
    assert re.search(message, str(refused.value))
    assert not (tmp_path / "run").exists()
