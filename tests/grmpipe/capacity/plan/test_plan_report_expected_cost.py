"""What a plan expects a run to ask of endpoints."""

from __future__ import annotations

import pytest

import grmpipe
from grmpipe.capacity.plan.plan_report import expect_requests, plan, warn_of_bounds
from grmpipe.capacity.plan.run_facts import collect_facts
from grmpipe.capacity.plan.work import judge_lengths

OUTSIDE = (
    "grm.engine=openai", "grm.path=a-judge", "engine.openai.api_key_env=''", "train.num_steps=25", "evaluate.every=10",
    "train.groups_per_batch=4", "train.group_size=4", "data.num_prompts=64", "data.num_eval_prompts=20",
    "judge_monitor.anchors=8", "judge.num_judgements=2", "evaluate.num_samples=3", "plan.judgement_tokens=50",
    "grm.price.input=2", "grm.price.output=10",
)  # fmt: skip


def test_a_plan_counts_steps_and_evaluations_and_warns_of_a_bound_below_them() -> None:
    bounds = ("budget.max_requests=1100", "budget.max_tokens=10000000", "budget.max_cost=0.5")
    facts = collect_facts(grmpipe.compose("quickstart", [*OUTSIDE, *bounds]))
    (expected,) = expect_requests(facts)
    assert expected.judged == 25 * 16 * 2
    assert expected.held_out == (20 + 8 + 8 + 20) * 3 * 2, "before the first step, after the 10th, 20th and last"
    asked, prompt = 800 + 336, judge_lengths("judge", facts).prompt_tokens
    assert expected.sampled_tokens == pytest.approx(asked * 50)
    assert expected.prompt_tokens == pytest.approx(asked * prompt)
    assert expected.cost_usd == pytest.approx(asked * (2 * prompt + 10 * 50) / 1e6)
    requests, cost = warn_of_bounds(facts, [expected])
    assert requests.startswith("budget.max_requests=1100: the run is expected to take 1,136 requests")
    assert cost.startswith("budget.max_cost=0.5: the run is expected to take 0.")


def test_a_plan_shows_no_cost_without_a_price_and_nothing_without_an_endpoint() -> None:
    priced, free = plan(grmpipe.compose("quickstart", OUTSIDE)), plan(grmpipe.compose("quickstart", OUTSIDE[:-2]))
    assert "grm: 800 requests of the steps and 336 of evaluations" in priced.text and " USD" in priced.text
    assert "grm: 800 requests of the steps" in free.text and " USD" not in free.text
    assert "endpoints" not in plan(grmpipe.compose("quickstart")).text
