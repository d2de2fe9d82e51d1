"""A cascade asks the better judge where the first is unsure, within its share, and measures what that costs."""

from __future__ import annotations

import dataclasses
import random
import statistics
from typing import Any

import pytest

from grmpipe.judge.composition.cascade import Audit
from grmpipe.judge.composition.cascade_counts import CascadeCounts
from grmpipe.judge.composition.composed_judge import get_bounds, with_own_bounds
from grmpipe.judge.composition.share_bound import ShareBounds
from grmpipe.types import CascadeEvent, Failed, Verdict

CASCADE: dict[str, Any] = {"kind": "cascade", "first": "cheap", "then": "good", "unsure_band": [0.4, 0.6]}
ALL = {**CASCADE, "share": 1.0, "audit_share": 1e-9}
SURE, UNSURE = 0.9, 0.5


def unsure_of(*siblings: int) -> Any:
    return lambda group, sibling: UNSURE if sibling in siblings else SURE


def good(group: str, sibling: int) -> float:
    return 0.2


def events(reports: dict[int, Any]) -> list[CascadeEvent]:
    return [event for report in reports.values() for event in report.cascades]


def test_a_sure_group_keeps_its_cheap_verdicts(group_bench: Any) -> None:
    table = group_bench.composed(ALL, {"cheap": unsure_of(), "good": good})
    reports = table.reports()
    assert [group_bench.outcome_of(report) for report in reports.values()] == [SURE] * 4
    assert not table.judges["good"].asked
    assert events(reports) == [CascadeEvent(cascade="reward", rollouts=4)]


def test_one_unsure_sibling_escalates_its_whole_group(group_bench: Any) -> None:
    table = group_bench.composed(ALL, {"cheap": unsure_of(2), "good": good}, delays=4)
    reports = table.reports()
    assert [group_bench.outcome_of(report) for report in reports.values()] == [0.2] * 4
    assert events(reports) == [CascadeEvent(cascade="reward", rollouts=4, unsure=1, escalated=4)]
    assert all(set(report.by_judge) == {"cheap", "good"} for report in reports.values())


def test_single_rollouts_are_escalated_if_asked_for(group_bench: Any) -> None:
    table = group_bench.composed({**ALL, "escalate": "rollout"}, {"cheap": unsure_of(2), "good": good})
    assert table.outcomes() == [SURE, SURE, 0.2, SURE]
    assert table.asked("good") == [2]


def test_votes_that_spread_are_unsure(group_bench: Any) -> None:
    spread = {**ALL, "unsure_band": None, "unsure_above_std": 0.3, "escalate": "rollout"}
    votes = {0: (0.9, 0.9), 1: (0.5, 1.0), 2: (0.2, 1.0), 3: (0.0, 1.0)}
    table = group_bench.composed(spread, {"cheap": lambda group, sibling: votes[sibling], "good": good})
    table.outcomes()
    assert table.asked("good") == [2, 3], "population standard deviations 0, 0.25, 0.4, 0.5"


@pytest.mark.parametrize(("cause", "asked"), [("undecided", [1]), ("unparseable", [])])
def test_an_abstention_is_doubt_and_another_failure_is_not(group_bench: Any, cause: Any, asked: list[int]) -> None:
    failed = Failed(stage="judge", cause=cause, attempts=1, detail="?")
    cheap = lambda group, sibling: failed if sibling == 1 else SURE  # noqa: E731
    table = group_bench.composed({**ALL, "escalate": "rollout"}, {"cheap": cheap, "good": good})
    assert table.outcomes() == [SURE, 0.2 if asked else cause, SURE, SURE]
    assert table.asked("good") == asked


def test_cheap_verdict_never_replaces_a_good_one_that_failed(group_bench: Any) -> None:
    fails = lambda group, sibling: group_bench.refused if sibling == 1 else 0.2  # noqa: E731
    assert group_bench.composed(ALL, {"cheap": unsure_of(2), "good": fails}).outcomes() == [0.2, "refused", 0.2, 0.2]
    audited = group_bench.composed({**ALL, "audit_share": 1.0}, {"cheap": unsure_of(), "good": fails})
    assert audited.outcomes() == [0.2, "refused", 0.2, 0.2]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.7, 1.0])
def test_no_more_than_its_share_is_escalated_at_any_time(share: float) -> None:
    draw, bound = random.Random(share), ShareBounds()
    decided = escalated = 0
    for _ in range(500):
        size = draw.choice([1, 4, 8])
        decided += size
        escalated += size * bound.lets("reward", share, size, wanted=draw.random() < 0.8)
        assert escalated <= share * decided
    assert escalated >= min(share, 0.8) * decided - 40, "what may be escalated is"


def test_an_unsure_group_beyond_the_share_keeps_its_cheap_verdicts_and_is_counted(group_bench: Any) -> None:
    table = group_bench.composed({**ALL, "share": 0.5}, {"cheap": unsure_of(0, 1, 2, 3), "good": good})
    found = [events(table.reports(group_id=f"g{number:06d}")) for number in range(4)]
    assert [event.escalated for (event,) in found] == [0, 4, 0, 4]
    assert all(event.unsure == 4 for (event,) in found)


def test_after_a_resume_the_share_is_that_of_the_whole_run(group_bench: Any) -> None:
    before = {"reward": CascadeCounts(rollouts=80, escalated=36)}  # of 40 at a share of one half
    table = group_bench.composed({**ALL, "share": 0.5}, {"cheap": unsure_of(0, 1, 2, 3), "good": good})
    get_bounds(table.judge).go_on(before)
    found = [events(table.reports(group_id=f"g{number:06d}"))[0].escalated for number in range(4)]
    assert found == [4, 4, 0, 4]
    separate = dataclasses.replace(table, judge=with_own_bounds(table.judge))
    assert events(separate.reports(group_id="evaluated"))[0].escalated == 0


def test_rollouts_that_arent_trained_use_up_nothing_of_the_share(group_bench: Any) -> None:
    table = group_bench.composed({**ALL, "share": 0.5}, {"cheap": unsure_of(0, 1, 2, 3), "good": good})
    separate = dataclasses.replace(table, judge=with_own_bounds(table.judge))
    trained = []
    for number in range(4):
        trained += events(table.reports(group_id=f"g{number:06d}"))
        separate.reports(group_id=f"evaluated{number}", size=1)
    assert [event.escalated for event in trained] == [0, 4, 0, 4]


def test_the_same_groups_are_audited_in_every_run_of_a_seed() -> None:
    names = [f"g{number:06d}" for number in range(4000)]
    taken = [name for name in names if Audit(share=0.1, seed=3).takes("reward", name)]
    assert len(taken) == pytest.approx(400, rel=0.2)
    assert [name for name in names if Audit(share=0.1, seed=3).takes("reward", f"{name}~2")] == taken
    assert [name for name in names if Audit(share=0.1, seed=4).takes("reward", name)] != taken


@pytest.mark.parametrize("escalate", ["group", "rollout"])
def test_the_audit_estimates_the_true_error_of_sure_verdicts(group_bench: Any, escalate: str) -> None:
    """Noise that siblings share is in the estimate's standard error: the truth is within three of them."""
    draw = random.Random(5)
    groups = [f"g{number:06d}" for number in range(300)]
    shared = {group: draw.uniform(-0.2, 0.2) for group in groups}
    truth = {
        (group, sibling): 0.75 + shared[group] + draw.uniform(-0.05, 0.05) for group in groups for sibling in range(4)
    }
    table = group_bench.composed(
        {**CASCADE, "share": 1.0, "audit_share": 0.3, "escalate": escalate, "pass_at": 0.7},
        {"cheap": lambda group, sibling: 0.75, "good": lambda group, sibling: truth[group, sibling]},
        seed=1,
    )
    counts, by_group = CascadeCounts(), []
    for group in groups:
        for event in events(table.reports(group_id=group)):
            counts.count(event)
            by_group += [event.error / event.audited] if event.audited else []
    errors = [abs(good - 0.75) for good in truth.values()]
    assert counts.rollouts == 1200 and counts.escalated == 0
    assert counts.audited == pytest.approx(360, rel=0.25)
    assert counts.mean_error is not None and counts.standard_error is not None
    assert abs(counts.mean_error - statistics.fmean(errors)) < 3 * counts.standard_error
    assert counts.standard_error == pytest.approx(statistics.stdev(by_group) / len(by_group) ** 0.5, rel=1e-6)
    assert counts.flipped_share == pytest.approx(statistics.fmean(good < 0.7 for good in truth.values()), abs=0.1)


def test_audited_group_trains_on_the_good_verdict_and_is_counted_once(group_bench: Any) -> None:
    table = group_bench.composed(
        {**ALL, "audit_share": 1.0, "pass_at": 0.5}, {"cheap": unsure_of(), "good": good}, delays=9
    )
    reports = table.reports()
    assert [group_bench.outcome_of(report) for report in reports.values()] == [0.2] * 4
    decided, audited = events(reports)
    assert decided == CascadeEvent(cascade="reward", rollouts=4)
    assert (audited.audited, audited.flipped) == (4, 4)
    assert audited.error == pytest.approx(4 * 0.7)


def test_only_siblings_with_both_verdicts_are_in_an_audit(group_bench: Any) -> None:
    cheap = lambda group, sibling: group_bench.refused if sibling == 0 else SURE  # noqa: E731
    fails = lambda group, sibling: group_bench.refused if sibling == 1 else 0.2  # noqa: E731
    table = group_bench.composed({**ALL, "audit_share": 1.0}, {"cheap": cheap, "good": fails})
    reports = table.reports()
    assert [group_bench.outcome_of(report) for report in reports.values()] == [0.2, "refused", 0.2, 0.2]
    assert [event.audited for event in events(reports)] == [0, 2]


def test_a_route_to_another_judge_lets_no_cascade_decide(group_bench: Any) -> None:
    table = group_bench.composed(
        {"kind": "route", "route": {"math": "both"}, "default": "cheap"},
        {"cheap": unsure_of(0), "good": good},
        rewards={"both": ALL},
    )
    assert events(table.reports(source="chat")) == []
    assert [event.cascade for event in events(table.reports(source="math"))] == ["both"]


@pytest.mark.parametrize("vetoed", [(1,), (0, 1, 3)])
@pytest.mark.parametrize("order", range(3))
def test_siblings_that_a_gate_vetoes_keep_no_cascade_waiting(
    group_bench: Any, vetoed: tuple[int, ...], order: int
) -> None:
    """The siblings that pass are decided about, and are all that the cascade counts."""
    gate = {"kind": "gate", "gate": "safety", "inner": "doubted"}
    safety = lambda group, sibling: 0.1 if sibling in vetoed else 0.9  # noqa: E731
    judges = {"safety": safety, "cheap": unsure_of(2), "good": good}
    table = group_bench.composed(gate, judges, rewards={"doubted": ALL}, delays=order)
    reports = table.reports(order=order)
    assert [group_bench.outcome_of(reports[one]) for one in range(4)] == [
        0.0 if one in vetoed else 0.2 for one in range(4)
    ]
    assert events(reports) == [
        CascadeEvent(cascade="doubted", rollouts=4 - len(vetoed), unsure=1, escalated=4 - len(vetoed))
    ]


def test_cascades_nest(group_bench: Any) -> None:
    table = group_bench.composed(
        {**ALL, "then": "later"},
        {"cheap": unsure_of(0), "good": lambda group, sibling: 0.45, "best": lambda group, sibling: 0.1},
        rewards={"later": {**ALL, "first": "good", "then": "best"}},
    )
    reports = table.reports()
    assert [group_bench.outcome_of(report) for report in reports.values()] == [0.1] * 4
    assert isinstance(reports[0].verdict, Verdict)
    assert {event.cascade: event.escalated for event in events(reports)} == {"reward": 4, "later": 4}


# -- the alarm -------------------------------------------------------------------------------------------------------


def audits(errors: list[float]) -> CascadeCounts:
    counts = CascadeCounts()
    for error in errors:
        counts.count(CascadeEvent(cascade="reward", audited=4, error=4 * error, flipped=1))
    return counts


def test_counts_add_up() -> None:
    both, first, second = audits([0.125, 0.25, 0.5]), audits([0.125]), audits([0.25, 0.5])
    assert first + second == both
    assert CascadeCounts().mean_error is None and audits([0.1]).standard_error is None
