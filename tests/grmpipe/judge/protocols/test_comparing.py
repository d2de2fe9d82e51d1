"""Listwise and pairwise judging: when judge tasks run, in which order, and which sibling gets which result."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.config.judge import EarlyStopConfig
from grmpipe.judge.protocols.pairwise import list_pairs
from grmpipe.judge.votes import pair_result
from grmpipe.types import Failed, JudgeReport

LISTWISE = {"protocol": "listwise", "template": "listwise", "parser": "boxed"}
PAIRWISE = {"protocol": "pairwise", "template": "pairwise", "parser": "boxed", "vote": "majority"}
WORTH = {"bad": 2, "fair": 5, "good": 9}


def by_worth(bench: Any) -> Any:
    """A judge that sees the worth of each response."""

    def author(prompt: str, context: Any) -> Any:
        shown = re.findall(r"^> (\w+)$", prompt, re.MULTILINE)
        return bench.answer(f"I looked.\n\\boxed{{{', '.join(str(WORTH[text]) for text in shown)}}}")

    return author


def hear(bench: Any, judge: Any, texts: list[str]) -> dict[int, JudgeReport]:
    """The reports of a group whose rollouts end in reverse order; asserts that each sibling is reported once."""

    async def go() -> dict[int, JudgeReport]:
        session = judge.open(bench.prompt(), "g7", len(texts))
        judge_tasks = list(session.begin())
        for sibling in reversed(range(len(texts))):
            judge_tasks += session.add(bench.rollout(texts[sibling], sibling=sibling))
        reports: dict[int, JudgeReport] = {}
        for some in await asyncio.gather(*(session.judge(judge_task) for judge_task in judge_tasks)):
            assert not reports.keys() & some.keys()
            reports |= some
        return reports

    return bench.run(go())


def test_a_list_is_judged_once_in_many_orders_and_scores_find_their_way_back(bench: Any) -> None:
    judge, engine = bench.generative(by_worth(bench), num_judgements=6, **LISTWISE)
    texts = ["bad", "good", "fair", "bad"]
    reports = hear(bench, judge, texts)
    assert [reports[sibling].verdict.score for sibling in range(4)] == [WORTH[text] for text in texts]
    assert len(engine.asked) == 6
    assert [len(reports[sibling].judgements) for sibling in range(4)] == [6, 0, 0, 0]
    orders = {judgement.siblings for judgement in reports[0].judgements}
    assert len(orders) > 1 and all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_a_list_waits_for_its_last_sibling(bench: Any) -> None:
    judge, _ = bench.generative(by_worth(bench), **LISTWISE)
    session = judge.open(bench.prompt(), "g7", 2)
    assert session.begin() == () == session.add(bench.rollout("bad", sibling=1))
    (judge_task,) = session.add(bench.rollout("good", sibling=0))
    assert judge_task.members == (0, 1)


def test_place_in_the_list_that_always_wins_favours_no_sibling(bench: Any) -> None:
    """Each judgement has a new random order."""
    judge, _ = bench.generative(lambda prompt, context: bench.answer("\\boxed{10, 1}"), num_judgements=40, **LISTWISE)
    reports = hear(bench, judge, ["good", "bad"])
    assert all(3.5 < reports[sibling].verdict.score < 7.5 for sibling in (0, 1))


def test_list_without_a_judgement_fails_every_sibling_and_is_counted_once(bench: Any) -> None:
    judge, _ = bench.generative(lambda prompt, context: bench.answer("\\boxed{3}"), **LISTWISE)
    reports = hear(bench, judge, ["good", "bad"])
    assert [report.verdict.cause for report in reports.values()] == ["unparseable"] * 2
    assert sorted(len(report.failures) for report in reports.values()) == [0, 2]


def test_a_list_of_one_can_be_judged_and_a_pair_of_one_is_refused(bench: Any) -> None:
    judge, _ = bench.generative(by_worth(bench), **LISTWISE)
    assert bench.run(judge.judge(bench.prompt(), bench.rollout("fair"))).verdict.score == 5
    judge, engine = bench.generative(by_worth(bench), num_judgements=2, **PAIRWISE)
    verdict = bench.run(judge.judge(bench.prompt(), bench.rollout("fair"))).verdict
    assert isinstance(verdict, Failed) and verdict.cause == "refused"
    assert engine.asked == []


@pytest.mark.parametrize(("kind", "pairs"), [("all", 6), ("ring", 4)])
def test_pairs_meet_in_both_orders_and_the_share_won_is_the_score(bench: Any, kind: str, pairs: int) -> None:
    judge, engine = bench.generative(by_worth(bench), num_judgements=2, pairs=kind, **PAIRWISE)
    reports = hear(bench, judge, ["good", "fair", "bad", "fair"])
    scores = [reports[sibling].verdict.score for sibling in range(4)]
    assert scores == [10, 5.5, 1, 5.5]
    assert len(engine.asked) == 2 * pairs == sum(len(report.judgements) for report in reports.values())
    asked = [judgement.siblings for report in reports.values() for judgement in report.judgements]
    assert all(tuple(reversed(order)) in asked for order in asked)
    assert [report.verdict.outcome for _, report in sorted(reports.items())] == pytest.approx([1, 0.5, 0, 0.5])


def test_judge_that_prefers_a_place_gives_ties(bench: Any) -> None:
    judge, _ = bench.generative(lambda prompt, context: bench.answer("\\boxed{9, 2}"), num_judgements=4, **PAIRWISE)
    reports = hear(bench, judge, ["good", "bad", "fair"])
    assert {report.verdict.score for report in reports.values()} == {5.5}
    assert all(report.verdict.score_std == pytest.approx(4.5) for report in reports.values())


def place_lover(bench: Any, *failing: int) -> Any:
    """A judge that always prefers the first place, except in the failing judgements."""

    def author(prompt: str, context: Any) -> Any:
        index = int(context.request_id.split("/j")[1].split(".")[0])
        return bench.answer("hm" if index in failing else "\\boxed{9, 2}")

    return author


@pytest.mark.parametrize("failing", [(0,), (1, 3, 5), (0, 2, 7), (0, 2, 4, 1)])
def test_judge_that_prefers_a_place_gives_ties_where_some_judgements_fail(bench: Any, failing: tuple[int, ...]) -> None:
    judge, _ = bench.generative(place_lover(bench, *failing), num_judgements=8, max_retries=0, **PAIRWISE)
    reports = hear(bench, judge, ["good", "bad"])
    assert [reports[sibling].verdict.score for sibling in (0, 1)] == [5.5, 5.5]


def test_a_pair_that_was_judged_in_one_order_only_is_no_match(bench: Any) -> None:
    judge, _ = bench.generative(place_lover(bench, 1, 3), num_judgements=4, max_retries=0, **PAIRWISE)
    reports = hear(bench, judge, ["good", "bad"])
    assert [reports[sibling].verdict.cause for sibling in (0, 1)] == ["unparseable"] * 2
    assert len(reports[0].judgements) == len(reports[0].failures) == 2

    def author(prompt: str, context: Any) -> Any:
        one_order = place_lover(bench, 0, 2)(prompt, context)
        return one_order if "/0-1/" in context.request_id else by_worth(bench)(prompt, context)

    judge, _ = bench.generative(author, num_judgements=4, max_retries=0, **PAIRWISE)
    reports = hear(bench, judge, ["good", "bad", "fair"])
    assert [reports[sibling].verdict.score for sibling in (0, 1, 2)] == [10, 1, 5.5]
    assert [reports[sibling].verdict.num_judgements for sibling in (0, 1, 2)] == [4, 4, 8]
    assert {reports[sibling].verdict.score_std for sibling in (0, 1)} == {0.0}


def test_a_pair_that_failed_leaves_the_others_and_no_pair_at_all_is_a_failure(bench: Any) -> None:
    def author(prompt: str, context: Any) -> Any:
        return bench.answer("hm") if "/0-1/" in context.request_id else bench.answer("\\boxed{4, 4}")

    judge, _ = bench.generative(author, num_judgements=2, **PAIRWISE)
    three = hear(bench, judge, ["good", "bad", "fair"])
    assert {report.verdict.score for report in three.values()} == {5.5}
    two = hear(bench, judge, ["good", "bad"])
    assert [report.verdict.cause for report in two.values()] == ["unparseable"] * 2


@pytest.mark.parametrize("worse", ["bad", "fair"])
def test_a_pair_stops_when_its_winner_is_fixed(bench: Any, worse: str) -> None:
    judge, engine = bench.generative(
        by_worth(bench), num_judgements=8, early_stop=EarlyStopConfig(kind="exact"), **PAIRWISE
    )
    reports = hear(bench, judge, ["good", worse])
    assert [reports[sibling].verdict.score for sibling in (0, 1)] == [10, 1]
    assert len(engine.asked) == 5
    lengths = [judgement.completion.num_tokens for judgement in reports[0].judgements]
    assert reports[0].saved_tokens + reports[1].saved_tokens == round(3 * sum(lengths) / 5)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), num_judgements=st.sampled_from([4, 8]))
def test_an_exact_stop_changes_no_score_of_any_sibling(bench: Any, seed: int, num_judgements: int) -> None:
    """For any judgements in any order, and also if some fail."""

    def author(prompt: str, context: Any) -> Any:
        rng = random.Random(f"{seed} {context.request_id}")
        text = rng.choice(["hm", *[f"\\boxed{{{rng.randint(1, 3)}, {rng.randint(1, 3)}}}"] * rng.choice([1, 4])])
        return bench.answer(text, delay_s=rng.random())

    def told(report: JudgeReport) -> float | str:
        return report.verdict.cause if isinstance(report.verdict, Failed) else report.verdict.score

    found = []
    for stop in (EarlyStopConfig(), EarlyStopConfig(kind="exact")):
        judge, _ = bench.generative(author, num_judgements=num_judgements, max_retries=0, early_stop=stop, **PAIRWISE)
        reports = hear(bench, judge, ["good", "bad"])
        found.append([told(reports[sibling]) for sibling in (0, 1)])
    assert found[0] == found[1]


def test_ring_pairs_each_sibling_with_the_next() -> None:
    assert list_pairs(4, "ring") == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert list_pairs(2, "ring") == list_pairs(2, "all") == [(0, 1)]
    assert list_pairs(1, "ring") == list_pairs(1, "all") == []
    assert len(list_pairs(8, "all")) == 28


def test_a_pair_goes_by_the_mean_of_the_votes_of_either_order() -> None:
    assert [pair_result(*orders) for orders in ([[1], [1]], [[0], [0.5]], [[1, 1, 1], [0]], [[0.5], [0.5]])] == [
        1,
        0,
        0.5,
        0.5,
    ]
    assert pair_result([1, 1, 0], [1, 0, 0]) == 0.5
    assert pair_result([1, 1, 0], [1, 0.5, 0]) == 1
    sevenths = [1] * 3 + [0] * 4
    assert pair_result(sevenths, [1 - vote for vote in sevenths]) == 0.5


def test_by_the_mean_a_vote_counts_by_its_margin_in_both_orders(bench: Any) -> None:
    """A judge of 1 to 10 that gives the first one 9 and 5, then 5 and 5."""
    mean = {**PAIRWISE, "vote": "mean", "num_judgements": 2}

    def author(prompt: str, context: Any) -> Any:
        return bench.answer("\\boxed{9, 5}" if prompt.index("good") < prompt.index("bad") else "\\boxed{5, 5}")

    judge, _ = bench.generative(author, **mean)
    reports = hear(bench, judge, ["good", "bad"])
    margin = (9 - 5) / (10 - 1) / 2
    outcomes = [reports[sibling].verdict.outcome for sibling in (0, 1)]
    assert outcomes == pytest.approx([0.5 + margin / 2, 0.5 - margin / 2])
    judge, _ = bench.generative(author, **{**mean, "vote": "majority"})
    assert [report.verdict.outcome for _, report in sorted(hear(bench, judge, ["good", "bad"]).items())] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("label", "outcome"), [("A>>B", 1.0), ("A>B", 2 / 3), ("A=B", 0.5), ("B>A", 1 / 3), ("B>>A", 0.0)]
)
def test_a_great_difference_of_arena_hard_counts_three_times_a_slight_one(
    bench: Any, label: str, outcome: float
) -> None:
    form = {"protocol": "pairwise", "template": "arena_hard", "parser": "margin", "vote": "mean", "num_judgements": 2}
    turned = label if label == "A=B" else label.translate({ord("A"): "B", ord("B"): "A"})

    def author(prompt: str, context: Any) -> Any:
        return bench.answer(f"So: [[{label if prompt.index('good') < prompt.index('bad') else turned}]]")

    judge, _ = bench.generative(author, score_min=0, score_max=1, **form)
    reports = hear(bench, judge, ["good", "bad"])
    assert [reports[sibling].verdict.outcome for sibling in (0, 1)] == pytest.approx([outcome, 1 - outcome])
