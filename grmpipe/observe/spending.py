"""What requests to endpoints used and cost, against the bounds of a budget. Sends and writes nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grmpipe.config.budget import BudgetConfig
from grmpipe.models.settings import PriceConfig
from grmpipe.models.types import Usage
from grmpipe.observe.judge_requests import RequestCounts, RequestTotals

UNITS = {"max_requests": "requests", "max_tokens": "tokens", "max_cost": "cost_usd"}  # key of a bound -> what it bounds
WAY_OUT = "raise it, or type null, and continue with resume=auto; what was paid is kept"
SHOWN = {"requests": "{:,.0f}", "tokens": "{:,.0f}", "cost_usd": "{:,.4g} USD"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Requests, and what they used."""

    requests: int = 0
    tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            requests=self.requests + other.requests,
            tokens=self.tokens + other.tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )

    def value(self, unit: str) -> float:
        return {"requests": self.requests, "tokens": self.tokens, "cost_usd": self.cost_usd}[unit]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendingSummary:
    """What endpoints were asked by a run with a price or a budget, resumes included.

    Tokens and cost are those that an answer told. The unknown requests count as requests; of their tokens only the most
    that they can have used is known, and that is what they take from a budget.
    """

    requests: int = 0
    tokens: int = 0
    cost_usd: float | None = None  # None: of no model the price is known
    unknown_requests: int = 0
    unknown_tokens: int = 0
    unknown_cost_usd: float | None = None
    left_requests: float | None = None  # None: no such bound
    left_tokens: float | None = None
    left_cost_usd: float | None = None


class Spending:
    """The spending of a run. prices: model behind an endpoint -> its price. totals: of all requests of the run."""

    def __init__(self, prices: Mapping[str, PriceConfig], budget: BudgetConfig, totals: RequestTotals) -> None:
        self.prices = prices
        self.bounds = budget.bounds
        self._bounds = {UNITS[key]: (f"budget.{key}", bound) for key, bound in budget.bounds.items()}
        self._totals = totals

    @property
    def is_bounded(self) -> bool:
        return bool(self._bounds)

    @property
    def is_priced(self) -> bool:
        """Whether the price of a model is known."""
        return any(price.is_known for price in self.prices.values())

    @property
    def is_shown(self) -> bool:
        """Whether there is a price or a budget."""
        return self.is_bounded or self.is_priced

    @property
    def known(self) -> Amount:
        """All requests, with the tokens that answers told."""
        return sum((self._cost(model, counts) for model, counts in self._counts), Amount())

    @property
    def unknown(self) -> Amount:
        """The requests without a count of tokens, those in flight among them, with the most that they can have used."""
        amount = Amount(requests=sum(counts.unknown for _, counts in self._counts))
        for model, price in self.prices.items():
            most = self._totals.most.get(model, Usage())
            cost_usd = price.cost_usd(most.prompt, 0, most.sampled)
            amount += Amount(tokens=most.prompt + most.sampled, cost_usd=cost_usd)
        return amount

    def explain_excess(self, model: str, most: Usage) -> str:
        """Which bound one more request to a model may exceed, in words that begin with its key; empty: none."""
        if not self._bounds:
            return ""
        known, unknown = self.known, self.unknown
        next_one = Amount(
            requests=1,
            tokens=most.prompt + most.sampled,
            cost_usd=self.prices[model].cost_usd(most.prompt, 0, most.sampled),
        )
        # A request counts as one whether or not its tokens are known.
        reserved = Amount(tokens=unknown.tokens, cost_usd=unknown.cost_usd)
        for unit, (key, bound) in self._bounds.items():
            if (known + reserved + next_one).value(unit) > bound * (1 + 1e-9):  # costs are sums of rounded products
                return describe(key, unit, bound, known, unknown, next_one)
        return ""

    def left(self, unit: str) -> float | None:
        """What is left under the bound of a unit; None: it has none."""
        if unit not in self._bounds:
            return None
        reserved = 0.0 if unit == "requests" else self.unknown.value(unit)
        return max(0.0, self._bounds[unit][1] - self.known.value(unit) - reserved)

    @property
    def summary(self) -> SpendingSummary | None:
        """None without a price or a budget."""
        if not self.is_shown:
            return None
        known, unknown, is_priced = self.known, self.unknown, self.is_priced
        return SpendingSummary(
            requests=known.requests,
            tokens=known.tokens,
            cost_usd=known.cost_usd if is_priced else None,
            unknown_requests=unknown.requests,
            unknown_tokens=unknown.tokens,
            unknown_cost_usd=unknown.cost_usd if is_priced else None,
            left_requests=self.left("requests"),
            left_tokens=self.left("tokens"),
            left_cost_usd=self.left("cost_usd"),
        )

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the summary that are known, by name."""
        if (summary := self.summary) is None:
            return {}
        values = {name: getattr(summary, name) for name in SpendingSummary.__dataclass_fields__}
        return {name: float(value) for name, value in values.items() if value is not None}

    @property
    def _counts(self) -> list[tuple[str, RequestCounts]]:
        """(model, counts) of the models behind endpoints."""
        by_model = self._totals.counts
        return [(model, counts) for model in self.prices for counts in by_model.get(model, {}).values()]

    def _cost(self, model: str, counts: RequestCounts) -> Amount:
        prompt, sampled = counts.prompt_tokens, counts.sampled_tokens
        cost_usd = self.prices[model].cost_usd(prompt, counts.cached_tokens, sampled)
        return Amount(requests=counts.requests, tokens=prompt + sampled, cost_usd=cost_usd)


def describe_spending(figures: Mapping[str, float]) -> str:
    """The figures of a SpendingSummary in words; empty without any."""
    if not figures:
        return ""

    def list_amounts(prefix: str) -> list[str]:
        found = {unit: figures[f"{prefix}{unit}"] for unit in SHOWN if f"{prefix}{unit}" in figures}
        return [SHOWN[unit].format(value) + ("" if unit == "cost_usd" else f" {unit}") for unit, value in found.items()]

    said = ["spent " + ", ".join(list_amounts(""))]
    if figures.get("unknown_requests"):
        number, *most = list_amounts("unknown_")
        said.append(f"by {number} of these at most {', '.join(most)} more, which no answer told")
    if left := list_amounts("left_"):
        said.append("left " + ", ".join(left))
    return "; ".join(said)


def list_prometheus_lines(figures: Mapping[str, float]) -> Iterator[str]:
    """The figures of a SpendingSummary as Prometheus reads them."""
    for name, value in figures.items():
        kind, metric = ("counter", f"{name}_total") if name in SHOWN else ("gauge", name)
        yield f"# TYPE grmpipe_endpoint_{metric} {kind}"
        yield f"grmpipe_endpoint_{metric} {value:.10g}"


def describe(key: str, unit: str, bound: float, known: Amount, unknown: Amount, next_one: Amount) -> str:
    """Why a request doesn't fit under a bound."""
    show = SHOWN[unit].format
    what = "" if unit == "cost_usd" else f" {unit}"
    of_unknown = (
        f", at most {show(unknown.value(unit))} more by {unknown.requests} requests whose tokens no answer told"
        if unknown.requests and unit != "requests"
        else ""
    )
    more = "" if unit == "requests" else f", and the next request may take {show(next_one.value(unit))}"
    return f"{key}: {show(known.value(unit))} of {show(bound)}{what} are spent{of_unknown}{more}"


def explain_nothing_left(spending: Spending, stopped_at: Mapping[str, float]) -> str:
    """Why a resume would stop at its first request, in words that begin with a key; empty: it wouldn't. stopped_at: the
    bounds that ended an earlier process.
    """
    for model in spending.prices:
        if words := spending.explain_excess(model, Usage(sampled=1)):
            return f"{words.partition(', and the next')[0]}; {WAY_OUT}"
    for key, bound in spending.bounds.items():
        if bound <= stopped_at.get(key, 0.0):
            words = describe(f"budget.{key}", UNITS[key], bound, spending.known, spending.unknown, Amount())
            return f"{words.partition(', and the next')[0]}, and the run stopped there; {WAY_OUT}"
    return ""
