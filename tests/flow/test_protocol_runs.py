"""Whole runs by protocol: the tiny GRM with an early stop, with a grammar, unparseable; a scripted one that
compares.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configs import judge_config, run_config

from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.simulate.simulated_answers import lognormal
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, simulate
from grmpipe.capacity.simulate.workload import Workload
from grmpipe.config.judge import EarlyStopConfig
from grmpipe.config.run_config import ConfigError
from grmpipe.config.train import TrainConfig
from grmpipe.data.stream import PromptStream
from grmpipe.models.types import EngineSpeed, Message
from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.types import Prompt


@pytest.mark.long
def test_a_relaxed_early_stop_saves_tokens_and_says_what_it_costs(small_run: Callable) -> None:
    """Two groups of the first batch show how noisy the judge is; from then on it may stop."""
    files = small_run(
        "train.num_steps=2",
        "judge.num_judgements=6",
        "judge.early_stop.kind=relaxed",
        "judge.early_stop.audit_share=0.3",
    )
    judging = files.summary["judging"]
    assert judging["saved_by_early_stop"] > 0
    assert 0 <= judging["early_stop_error"] < 9
    assert judging["counted"] < 6 * 2 * 16
    assert sum(step.get("judge/saved_tokens", 0) for step in files.steps()) == judging["saved_by_early_stop"]


def test_judgements_held_to_their_form_are_never_unparseable(small_run: Callable) -> None:
    files = small_run(
        "train.num_steps=1", "judge.format.structured=true", "judge.temperature=2.0", "judge.limits.max_retries=0"
    )
    failed = files.summary["judging"]["failed"]
    assert files.summary["judging"]["counted"] > 0
    assert failed.get("unparseable", 0) == failed.get("refused", 0) == 0


def test_a_grm_whose_answers_cannot_be_read_ends_before_the_first_step(small_run: Callable, tmp_path: Path) -> None:
    template = tmp_path / "boxed.jinja"
    template.write_text("Q: {{ question }}\nA:\n{{ response }}")
    with pytest.raises(ConfigError, match=r"^judge\.parser: boxed could read none of \d+ preflight judgements"):
        small_run(f"judge.template={template}", "judge.parser=boxed", "judge.max_new_tokens=64")
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()
    small_run("train.num_steps=1", "judge.template=tiny")


# -- a scripted GRM in the real pipeline on a virtual clock ------------------------------------------------------------

SPEED = EngineSpeed(step_s=0.01, row_s=0.0, cached_token_s=0.0, prefill_token_s=0.0, max_rows=64)
LISTWISE = {"protocol": "listwise", "template": "listwise", "parser": "boxed"}
PAIRWISE = {"protocol": "pairwise", "template": "pairwise", "parser": "boxed", "vote": "majority", "num_judgements": 4}
EXACT = EarlyStopConfig(kind="exact")
AHEAD = {"template": "shared_principles", "parser": "boxed", "principles": "shared"}


def simulated(**judge: Any) -> SimulatedRun:
    roles = {role: RoleConfig(pool=role) for role in ("policy", "grm", "learner")}
    placement = place(
        PlacementConfig(pools={role: PoolConfig(slots=1) for role in roles}, roles=roles), ("policy", "learner", "grm")
    )
    config = run_config(
        train=TrainConfig(groups_per_batch=2, group_size=4, max_staleness=1),
        judge=judge_config(max_new_tokens=100, **judge),
    )
    prompts = [
        Prompt(prompt_id=f"p{n}", messages=(Message(role="user", content=f"What is {n} + 1?"),)) for n in range(64)
    ]
    workload = Workload(
        config=config,
        prompts=PromptStream(prompts),
        chars_per_token={"policy": 4.0, "grm": 4.0},
        lengths={"policy": lognormal(20, 0.5), "judge": lognormal(30, 0.3)},
    )
    costs = Costs(engines={"policy": SPEED, "grm": SPEED}, learner=LearnerSpeed(token_s=0.0, step_s=0.1), sync_s=0.0)
    return simulate(workload, placement, costs, num_steps=4)


@pytest.mark.parametrize("max_concurrency", [1, 64])
@pytest.mark.parametrize(
    "judge",
    [LISTWISE, PAIRWISE, {**PAIRWISE, "pairs": "ring"}, {**PAIRWISE, "early_stop": EXACT}, AHEAD],
    ids=["listwise", "pairs", "ring", "exact", "ahead"],
)
def test_groups_are_judged_and_trained_by_every_protocol_at_any_width(
    judge: dict[str, Any], max_concurrency: int
) -> None:
    run = simulated(max_concurrency=max_concurrency, timeout_s=1000.0, **judge)
    assert len(run.steps) == 4
    assert (run.dropped, run.failed_judgements) == ({}, {})
