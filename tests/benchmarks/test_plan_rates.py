"""A plan's rates beside published ones: how far they are off for models that nothing was fitted to."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import plan_rates  # noqa: E402
from plan_rates import ENGINE_LIMITS, LEARNER_LIMITS, factor, fitted, unseen_ratios  # noqa: E402

from grmpipe.capacity.cost import ENGINE_RATES, ENGINE_SPREAD, LEARNER_RATES, LEARNER_SPREAD  # noqa: E402

TABLE = plan_rates.read_table()
LEARNERS = [row for row in TABLE.learners if row.modules == "transformers"]
OF_LEARNER, OF_ENGINE = plan_rates.learner_ratio(TABLE), plan_rates.engine_ratio(TABLE)


def test_every_published_rate_has_a_source_and_there_are_enough() -> None:
    rows = (*TABLE.learners, *TABLE.engines)
    assert all(row.source.split(",")[0] in TABLE.sources for row in rows)
    assert len(LEARNERS) >= 12 and len({row.model for row in LEARNERS}) >= 5
    assert len(TABLE.engines) >= 12 and len({row.model for row in TABLE.engines}) >= 5


@pytest.mark.parametrize(
    ("rows", "rates", "limits", "ratio", "spread"),
    [(LEARNERS, LEARNER_RATES, LEARNER_LIMITS, OF_LEARNER, LEARNER_SPREAD),
     (TABLE.engines, ENGINE_RATES, ENGINE_LIMITS, OF_ENGINE, ENGINE_SPREAD)],
    ids=["learners", "engines"],
)  # fmt: skip
def test_a_models_rates_are_within_a_factor_of_those_fitted_to_other_models(rows, rates, limits, ratio, spread) -> None:
    factors = [factor(one) for one in unseen_ratios(rows, rates, limits, ratio)]
    assert median(factors) <= 1.5
    assert max(factors) <= 2.5
    assert sum(one <= spread for one in factors) >= 0.9 * len(factors), "the range that a plan prints"


def test_the_rates_of_a_plan_are_those_that_fit_all_rows() -> None:
    for rows, rates, limits, ratio in (
        (LEARNERS, LEARNER_RATES, LEARNER_LIMITS, OF_LEARNER),
        (TABLE.engines, ENGINE_RATES, ENGINE_LIMITS, OF_ENGINE),
    ):
        found = fitted(rates, limits, rows, ratio)
        assert asdict(found) == pytest.approx(asdict(rates), rel=0.01), "type python benchmarks/plan_rates.py"


def test_tuned_learners_are_rarely_twice_as_fast() -> None:
    """They have fused or compiled kernels; nothing was fitted to them."""
    tuned = [OF_LEARNER(row, LEARNER_RATES) for row in TABLE.learners if row.modules == "tuned"]
    assert median(map(factor, tuned)) <= 1.5
    assert max(map(factor, tuned)) <= 2.5
    assert median(tuned) < 1


@pytest.mark.parametrize(
    ("model", "device", "adapters", "published"),
    [("qwen3_0_6b", "h100", 0, 16466), ("qwen3_4b", "h100", 0, 6215), ("qwen3_30b_a3b", "h200", 0, 4378)],
)
def test_small_models_and_mixtures_are_as_slow_as_published(
    model: str, device: str, adapters: int, published: int
) -> None:
    (row,) = [
        row
        for row in LEARNERS
        if (row.model, row.device, row.adapter_rank, row.tokens_per_s) == (model, device, adapters, published)
    ]
    assert factor(plan_rates.planned_learner(row, TABLE) / published) < 1.5


def test_the_page_is_written_from_the_present_rates() -> None:
    page = plan_rates.PAGE.read_text(encoding="utf-8")
    for learner in TABLE.learners:
        assert f"| {plan_rates.planned_learner(learner, TABLE):,.0f} |" in page
    for engine in TABLE.engines:
        assert f"| {plan_rates.planned_engine(engine, TABLE):,.0f} |" in page
