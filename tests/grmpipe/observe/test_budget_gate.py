"""The gate of a budget: what may be sent, what waits, what ends; and the answers that are kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from grmpipe.config.budget import BudgetConfig
from grmpipe.judge.grm import set_purpose
from grmpipe.models.settings import PriceConfig
from grmpipe.models.types import BudgetSpent, Usage
from grmpipe.observe.budget_gate import BudgetGate, PaidAnswers
from grmpipe.observe.guard import Guard
from grmpipe.observe.judge_requests import RequestJournal, read_totals
from grmpipe.observe.spending import Spending, explain_nothing_left
from grmpipe.scheduler.clock import ActiveClock

MOST = Usage(prompt=80, sampled=20)
PRICE = PriceConfig(input=2.0, cached=0.5, output=10.0)


def open_gate(run_dir: Path, *, is_service: bool = False, **bounds: float) -> BudgetGate:
    journal, guard = RequestJournal(run_dir), Guard()
    spending = Spending({"grm": PRICE}, BudgetConfig(**bounds), journal.totals)  # type: ignore[arg-type]
    return BudgetGate(spending, journal, PaidAnswers(run_dir, "", guard, is_kept=True), is_service=is_service)


async def ask(gate: BudgetGate, used: Usage | None, most: Usage = MOST, takes_s: float = 0.01) -> None:
    """A request as an endpoint's client makes it. used: None: no answer tells its tokens."""
    log = gate.of_model("grm")
    await log.until_affordable(most)
    number = log.begin_request(retry=False, most=most)
    try:
        await asyncio.sleep(takes_s)
        if used is not None:
            log.end_request(number, used)
    finally:
        log.close_request(number)


async def ask_many(gate: BudgetGate, count: int, used: Usage | None) -> int:
    """How many of these at once were refused; each of the others has ended."""
    results = await asyncio.gather(*(ask(gate, used) for _ in range(count)), return_exceptions=True)
    assert all(result is None or isinstance(result, BudgetSpent) for result in results)
    return sum(isinstance(result, BudgetSpent) for result in results)


def test_a_bound_of_requests_is_exact_and_requests_in_flight_end(tmp_path: Path) -> None:
    async def check() -> None:
        gate = open_gate(tmp_path, max_requests=7)
        assert await ask_many(gate, 20, Usage(prompt=50, sampled=5)) == 13
        assert gate.spending.figures == {
            "requests": 7, "tokens": 385, "cost_usd": pytest.approx(7 * (50 * 2 + 5 * 10) / 1e6), "unknown_requests": 0,
            "unknown_tokens": 0, "unknown_cost_usd": 0, "left_requests": 0,
        }  # fmt: skip

    asyncio.run(check())


@pytest.mark.parametrize(
    ("bounds", "sent"),
    [
        ({"max_tokens": 1000}, 17),  # each uses 55: after 17 are 65 left, and one more may use 100
        ({"max_cost": 0.002}, 11),  # each costs .00015; after 11 one more may cost .00036
    ],
)
def test_a_bound_of_tokens_or_cost_is_never_exceeded_and_used_to_less_than_one_request(
    tmp_path: Path, bounds: dict[str, float], sent: int
) -> None:
    async def check() -> None:
        gate = open_gate(tmp_path, **bounds)
        assert await ask_many(gate, 40, Usage(prompt=50, sampled=5)) == 40 - sent
        assert gate.spending.known.requests == sent

    asyncio.run(check())


def test_what_no_answer_told_counts_with_the_most_and_is_stated_as_unknown_after_a_kill_too(tmp_path: Path) -> None:
    async def check() -> None:
        gate = open_gate(tmp_path, max_tokens=1000)
        assert await ask_many(gate, 20, None) == 10
        later = open_gate(tmp_path, max_tokens=1100).spending  # the journal is never closed
        assert (later.known.requests, later.known.tokens, later.unknown.tokens) == (10, 0, 1000)
        assert later.figures["left_tokens"] == 100
        assert not later.explain_excess("grm", MOST)
        assert "at most 1,000 more by 10 requests" in later.explain_excess("grm", Usage(prompt=101))

    asyncio.run(check())


def test_a_clock_stands_still_while_a_request_waits_for_those_in_flight(tmp_path: Path) -> None:
    async def check() -> None:
        gate, clock = open_gate(tmp_path, max_tokens=150), ActiveClock()
        gate.clocks.add(clock)
        began = clock.now()
        await asyncio.gather(*(ask(gate, Usage(prompt=5), takes_s=0.2) for _ in range(2)))
        assert 0.19 < clock.now() - began < 0.3, "the second one waited for 0.2 s, which don't count"
        assert gate.spending.known.tokens == 10

    asyncio.run(check())


def test_a_service_goes_on_with_what_fits_after_a_question_that_does_not(tmp_path: Path) -> None:
    async def check() -> None:
        gate = open_gate(tmp_path, is_service=True, max_tokens=500)
        with pytest.raises(BudgetSpent, match=r"^budget\.max_tokens: 0 of 500 tokens .* may take 501; start the judge"):
            await ask(gate, Usage(), most=Usage(prompt=501))
        await ask(gate, Usage(prompt=10))
        run = open_gate(tmp_path, max_tokens=500)
        with pytest.raises(BudgetSpent):
            await ask(run, Usage(), most=Usage(prompt=501))
        with pytest.raises(BudgetSpent):
            await ask(run, Usage(prompt=10))

    asyncio.run(check())


def test_a_resume_is_refused_until_the_bound_that_ended_the_run_is_raised(tmp_path: Path) -> None:
    async def check() -> None:
        await ask_many(open_gate(tmp_path, max_tokens=250), 3, Usage(prompt=90))

    asyncio.run(check())
    totals = read_totals(tmp_path)
    assert totals.stopped_at == {"max_tokens": 250}

    def explain(**bounds: float) -> str:
        spending = Spending({"grm": PRICE}, BudgetConfig(**bounds), totals)  # type: ignore[arg-type]
        return explain_nothing_left(spending, totals.stopped_at)

    assert explain(max_tokens=250).startswith("budget.max_tokens: 180 of 250 tokens are spent, and the run stopped")
    assert explain(max_tokens=180).startswith("budget.max_tokens: 180 of 180 tokens are spent; raise it, or type null")
    assert explain(max_requests=2).startswith("budget.max_requests: 2 of 2 requests are spent; raise it")
    assert explain(max_tokens=251) == explain(max_requests=3) == explain() == ""


def test_an_answer_is_kept_for_one_resume_but_not_what_is_asked_again_on_purpose(tmp_path: Path) -> None:
    def open_store() -> PaidAnswers:
        return PaidAnswers(tmp_path, "run", Guard(), is_kept=True)

    before = open_store()
    before.keep("a", '{"text": "é"}')
    with set_purpose("monitoring"):
        before.keep("b", "{}")
    assert before.take("a") is None, "this process has it"
    after = open_store()
    with set_purpose("preflight"):
        assert after.take("a") is None
    assert (after.take("a"), after.take("a"), after.take("b")) == ('{"text": "é"}'.encode(), None, None)
