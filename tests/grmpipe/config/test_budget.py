"""Budgets and prices that can't be meant: named by their key, with the way out."""

from __future__ import annotations

from typing import Any

import pytest

import grmpipe
from grmpipe.config.run_config import ConfigError

OUTSIDE = ("grm.engine=openai", "grm.path=a-judge", "engine.openai.api_key_env=''")
SECOND = (
    "+grm@models.safety=path", "models.safety.path=another", "models.safety.engine=openai",
    "+judge@judges.safety=pointwise", "judges.safety.model=safety", "reward=mix",
    "reward.mix={judge: 0.5, safety: 0.5}",
)  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["budget.max_requests=0"], r"^budget\.max_requests: must be at least 1, got 0"),
        (["budget.max_cost=nan"], r"^budget\.max_cost: must be a number above 0, got nan"),
        (["budget.max_cost=5"], r"^grm\.price: budget\.max_cost needs the price .* type grm\.price\.input=<USD per"),
        (["grm.price.input=1"], r"^grm\.price\.output: missing; a price needs input and output"),
        (["grm.price.input=-1", "grm.price.output=1"], r"^grm\.price\.input: must be 0 or more, got -1"),
        ([*SECOND, "grm.price={input: 1, output: 2}", "budget.max_cost=5"], r"^models\.safety\.price: budget\.max_c"),
        (["grm.engine=embedded", "grm.path=tiny://grm", "budget.max_tokens=9"], r"^budget\.max_tokens: no model .*l$"),
        (["budget.max_budget=5"], r"^unknown key 'budget\.max_budget'; did you mean budget\.max_cost"),
        (["grm.input_cost_per_token=5"], r"did you mean grm\.price\.input"),
    ],
)  # fmt: skip
def test_a_budget_that_cannot_be_meant_is_refused_by_its_key(typed: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grmpipe.compose("quickstart", [*OUTSIDE, *typed])


def test_only_models_behind_endpoints_that_the_run_asks_count() -> None:
    def find(*typed: str) -> Any:
        return grmpipe.compose("quickstart", [*OUTSIDE, *typed])

    assert list(find(*SECOND).prices) == ["grm", "safety"]
    assert list(find(*SECOND, "models.safety.engine=embedded", "models.safety.path=tiny://grm").prices) == ["grm"]
    assert find("judge=rule").prices == {}
    price = find("grm.price={input: 2, output: 10}").prices["grm"]
    assert price.cost_usd(1_000_000, 400_000, 100_000) == 3.0, "cached tokens cost what the others do"
    price = find("grm.price={input: 2, cached: 0.5, output: 10}").prices["grm"]
    assert price.cost_usd(1_000_000, 400_000, 100_000) == pytest.approx(2 * 0.6 + 0.5 * 0.4 + 1)
