"""The budget of a run: how much it may ask of endpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from grmpipe.config.grm import ModelEntry
from grmpipe.models.bounds import Bounded, at_least, positive


@dataclass(frozen=True)
class BudgetConfig(Bounded):
    """What a run, an evaluation or a service may ask of all its models behind endpoints together, resumes included;
    docs/endpoints.md has what counts, and what happens at a bound.
    """

    max_requests: int | None = at_least(1, None)  # [requests] Most requests, retries included; null: no bound.
    max_tokens: int | None = at_least(1, None)  # Most tokens of prompts and answers; null: no bound.
    # [USD] Highest cost, by the price of each model (grm.price); null: no bound.
    max_cost: float | None = positive(None)

    @property
    def bounds(self) -> dict[str, float]:
        """Key -> bound, of those that are set."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def check_budget(budget: BudgetConfig, outside: Mapping[str, ModelEntry]) -> None:
    """Check that something counts against a budget, and that it can be counted. outside: the models behind endpoints
    that the run asks. Raises ValueError.
    """
    if not budget.bounds:
        return
    if not outside:
        key = f"budget.{next(iter(budget.bounds))}"
        raise ValueError(
            f"{key}: no model that this run asks is behind an endpoint (engine=openai), so nothing counts; type "
            f"{key}=null"
        )
    for model in outside.values():
        if budget.max_cost is not None and not model.price.is_known:
            raise ValueError(
                f"{model.key}.price: budget.max_cost needs the price of each model behind an endpoint; type "
                f"{model.key}.price.input=<USD per million tokens> {model.key}.price.output=<the same>, or "
                "budget.max_tokens=<bound> instead of budget.max_cost"
            )
