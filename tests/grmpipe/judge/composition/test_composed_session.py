"""A session asks each judge once, whatever comes first; nothing that it says is lost, and no failure is a number."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.verdict import outcome
from grmpipe.types import Failed, Verdict

SIZE = 4
CASCADE: dict[str, Any] = {"kind": "cascade", "first": "a", "then": "b", "unsure_band": [0.4, 0.6], "share": 1.0}
COMPOSITIONS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "mix": ({"kind": "mix", "mix": {"a": 1, "list": 2}}, {}),
    "by_group": ({"kind": "mix", "mix": {"a": 1, "b": 2}, "normalise": "group_std"}, {}),
    "jury": ({"kind": "jury", "members": ["a", "b", "list"], "quorum": 2}, {}),
    "gate": ({"kind": "gate", "gate": "a", "inner": "list"}, {}),
    "cascade": ({**CASCADE, "audit_share": 0.5}, {}),
    "by_rollout": ({**CASCADE, "then": "list", "escalate": "rollout", "audit_share": 0.5}, {}),
    "nested": (
        {"kind": "gate", "gate": "vote", "inner": "both"},
        {
            "vote": {"kind": "jury", "members": ["a", "b"], "quorum": 1, "vote": "median"},
            "both": {"kind": "mix", "mix": {"sure": 1, "b": 3}},
            "sure": {**CASCADE, "first": "b", "then": "list", "escalate": "group"},
        },
    ),
    "normalised_route": (
        {"kind": "route", "route": {"math": "a"}, "default": "both"},
        {"both": {"kind": "mix", "mix": {"list": 1, "b": 1}, "normalise": "group_std"}},
    ),
}
KINDS = pytest.mark.parametrize("kind", COMPOSITIONS)
JUDGES = ("a", "b", "list")


def given_by(table: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Judges who give the rewards of a table: judge -> the siblings' rewards or failures."""
    return {name: (lambda group, sibling, row=row: row[sibling]) for name, row in table.items()}


def drawn(seed: int, group_bench: Any, failing: float = 0.2) -> dict[str, tuple[Any, ...]]:
    draw = random.Random(seed)
    one = lambda: group_bench.refused if draw.random() < failing else draw.choice([0.1, 0.3, 0.5, 0.8])  # noqa: E731
    return {name: tuple(one() for _ in range(SIZE)) for name in JUDGES}


@KINDS
@pytest.mark.parametrize("rewards", range(3))
def test_the_order_of_arrival_changes_no_verdict(group_bench: Any, kind: str, rewards: int) -> None:
    reward, nested = COMPOSITIONS[kind]
    judges = given_by(drawn(rewards, group_bench))
    found = []
    for order in range(8):
        table = group_bench.composed(reward, judges, rewards=nested, delays=order)
        reports = dict(sorted(table.reports(SIZE, order=order).items()))
        assert list(reports) == list(range(SIZE)), "every sibling is reported on, once"
        assert all(len(judge.asked) == len(set(judge.asked)) for judge in table.judges.values())
        found.append([group_bench.outcome_of(report) for report in reports.values()])
    assert found == [found[0]] * 8


def may_be_missed(kind: str) -> set[str]:
    return {"cascade": {"a"}, "by_rollout": {"list"}, "gate": {"list"}, "nested": {"b", "list"}}.get(kind, set())


@KINDS
@given(data=st.data())
@settings(max_examples=15)
def test_a_failure_is_never_a_number(group_bench: Any, kind: str, data: st.DataObject) -> None:
    """A verdict is made of verdicts only: each is finite, and a judge that failed is in no breakdown. Only a jury does
    without a judge; a cascade without its first one, and a gate without whom its veto makes superfluous.
    """
    row = st.tuples(*[st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0, group_bench.refused])] * SIZE)
    judges = {name: data.draw(row) for name in JUDGES}
    reward, nested = COMPOSITIONS[kind]
    for sibling, report in group_bench.composed(reward, given_by(judges), rewards=nested).reports(SIZE).items():
        failed = {name for name in report.by_judge if isinstance(judges[name][sibling], Failed)}
        if isinstance(verdict := report.verdict, Verdict):
            assert math.isfinite(verdict.outcome) and math.isfinite(verdict.score)
            assert not failed & verdict.breakdown.keys()
            assert failed <= {*verdict.absent, *may_be_missed(kind)}
        else:
            assert failed, "nobody failed, so nothing does"
            assert verdict.cause == "refused"


@KINDS
def test_work_is_redone_after_a_resume_as_far_as_a_missing_verdict_needs_it(group_bench: Any, kind: str) -> None:
    """Tasks of siblings that have verdicts are skipped; the others get the verdicts they would have got."""
    reward, nested = COMPOSITIONS[kind]
    judges = given_by(drawn(1, group_bench, failing=0.0))
    whole = group_bench.composed(reward, judges, rewards=nested).reports(SIZE)
    for done in ({0}, {1, 3}, {0, 1, 2}):
        rest = group_bench.composed(reward, judges, rewards=nested).reports(SIZE, done=done, order=7)
        assert {sibling: group_bench.outcome_of(rest[sibling]) for sibling in sorted(rest)} == {
            sibling: group_bench.outcome_of(whole[sibling]) for sibling in range(SIZE) if sibling not in done
        }


def test_single_responses_with_verdicts_are_not_judged_again(group_bench: Any) -> None:
    judges = given_by(drawn(1, group_bench, failing=0.0))
    table = group_bench.composed({"kind": "mix", "mix": {"a": 1, "b": 1}}, judges)
    table.reports(SIZE, done={0, 2})
    assert table.asked("a") == table.asked("b") == [1, 3]


@KINDS
@pytest.mark.parametrize("order", range(4))
def test_every_judgement_is_reported_once(group_bench: Any, kind: str, order: int) -> None:
    """Judgements by all siblings at once, too, although the sibling whose report has them may have been vetoed."""
    reward, nested = COMPOSITIONS[kind]
    table = group_bench.composed(reward, given_by(drawn(order, group_bench, failing=0.0)), rewards=nested, delays=order)
    reports = table.reports(SIZE, order=order).values()
    for name, judge in table.judges.items():
        given = [one for report in reports if name in report.by_judge for one in report.by_judge[name].judgements]
        assert len(given) == (bool(judge.asked) if name == "list" else len(judge.asked))
    assert sum(len(report.judgements) for report in reports) == sum(
        len(own.judgements) for report in reports for own in report.by_judge.values()
    )


def test_a_judge_that_compares_gets_the_whole_group_as_soon_as_one_sibling_needs_it(group_bench: Any) -> None:
    judges = given_by({"a": (0.1, 0.9, 0.1, 0.1), "list": (0.2, 0.3, 0.4, 0.5), "b": (0.0,) * 4})
    table = group_bench.composed({"kind": "gate", "gate": "a", "inner": "list"}, judges)
    assert table.outcomes(SIZE) == [0.0, 0.3, 0.0, 0.0]
    assert table.asked("list") == [0, 1, 2, 3]
    nobody = group_bench.composed({"kind": "gate", "gate": "a", "inner": "list", "min_reward": 1.0}, judges)
    assert nobody.outcomes(SIZE) == [0.0] * 4
    assert nobody.asked("list") == []


def test_a_number_that_is_not_finite_is_a_failure_of_its_judge(group_bench: Any) -> None:
    broken = Verdict(
        rewards=outcome(rollout_of_text("g", 0, ""), math.nan), score=1, breakdown={}, score_std=0, num_judgements=1
    )
    judges = {"a": lambda group, sibling: broken, "b": lambda group, sibling: 0.5}
    (report,) = group_bench.composed({"kind": "jury", "members": ["a", "b"], "quorum": 1}, judges).reports(1).values()
    assert report.verdict.outcome == pytest.approx(0.5)
    assert report.by_judge["a"].verdict.cause == "unparseable"


def test_a_crash_of_a_judge_is_raised_itself(group_bench: Any) -> None:
    def crash(group: str, sibling: int) -> float:
        raise ZeroDivisionError("a programming error")

    table = group_bench.composed(
        {"kind": "gate", "gate": "a", "inner": "b"}, {"a": lambda group, sibling: 0.9, "b": crash}
    )
    with pytest.raises(ExceptionGroup) as error:
        table.reports(1)
    assert error.group_contains(ZeroDivisionError, match="a programming error", depth=1)


ALONE = {"a": 0.9, "b": 0.3, "list_pairs": 1.0}  # judge -> its reward of a response, if it takes a single one


@pytest.mark.parametrize(
    ("reward", "given", "asked"),
    [
        ({"kind": "jury", "members": ["a", "b", "list_pairs"], "quorum": 2}, 0.6, "ab"),
        ({"kind": "jury", "members": ["a", "b", "list_pairs"]}, "refused", "ab"),
        ({"kind": "mix", "mix": {"a": 1, "list_pairs": 1}}, "refused", "a"),
        ({"kind": "mix", "mix": {"a": 1, "list_pairs": 1}, "normalise": "group_std"}, "refused", "a"),
        ({"kind": "gate", "gate": "a", "inner": "list_pairs"}, "refused", "a"),
        ({"kind": "gate", "gate": "b", "inner": "list_pairs"}, 0.0, "b"),
        ({**CASCADE, "first": "list_pairs", "then": "a"}, "refused", ""),
        ({**CASCADE, "first": "a", "then": "list_pairs", "audit_share": 1.0}, "refused", "a"),
    ],
)
def test_comparing_judge_fails_on_a_single_response_and_the_others_still_report(
    group_bench: Any, reward: dict[str, Any], given: float | str, asked: str
) -> None:
    """So an evaluation keeps the numbers of all other judges, and a jury goes on down to its quorum."""
    judges = {name: (lambda group, sibling, one=one: one) for name, one in ALONE.items()}
    (report,) = group_bench.composed(reward, judges, delays=1).reports(1).values()
    assert group_bench.outcome_of(report) == given
    own = {name: group_bench.outcome_of(one) for name, one in report.by_judge.items()}
    assert own.pop("list_pairs", "refused") == "refused"
    assert own == {name: ALONE[name] for name in asked}
    if given == 0.6:
        assert report.verdict.absent == ("list_pairs",)
