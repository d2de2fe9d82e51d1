"""An exact stop never changes the winner; a relaxed one waits for what it must know, and is audited."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.config.judge import EarlyStopConfig
from grmpipe.judge.protocols.sampled_judgements import (
    Noise,
    OrderCounts,
    Stop,
    fewest_for_a_winner,
    is_sure,
    sample_judgements,
    winner_is_fixed,
)
from grmpipe.judge.votes import pair_result
from grmpipe.types import Judgement, JudgeReport

VOTES = st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=8, max_size=8)  # None: the judgement failed


def counters(votes: Sequence[float | None], count: int, parity: int) -> OrderCounts:
    """The even or the odd ones of the first `count` votes."""
    own = [vote for vote in votes[parity:count:2] if vote is not None]
    return OrderCounts(points=sum(own), num_votes=len(own), num_left=len(votes[parity::2]) - len(votes[parity:count:2]))


def fixed_after(votes: Sequence[float | None], count: int) -> bool:
    return winner_is_fixed(counters(votes, count, 0), counters(votes, count, 1))


@settings(max_examples=500)
@given(votes=VOTES)
def test_an_exact_stop_never_changes_the_winner_of_the_full_vote(votes: Sequence[float | None]) -> None:
    even, odd = ([vote for vote in votes[parity::2] if vote is not None] for parity in (0, 1))
    for count in range(1, 8):
        if fixed_after(votes, count):
            so_far = [[vote for vote in votes[parity:count:2] if vote is not None] for parity in (0, 1)]
            assert count >= 5
            assert pair_result(even, odd) == pair_result(*so_far) != 0.5


def test_an_exact_stop_waits_for_nothing_that_could_not_change_the_winner() -> None:
    """Some possible results, including failures, would change the winner; otherwise it has stopped."""
    for seen in itertools.product((0.0, 1.0, None), repeat=6):
        results = set()
        for rest in itertools.product((0.0, 1.0, None), repeat=2):
            even, odd = ([vote for vote in (*seen, *rest)[parity::2] if vote is not None] for parity in (0, 1))
            results.add(pair_result(even, odd) if even and odd else None)
        assert fixed_after((*seen, None, None), 6) == (results in ({0.0}, {1.0})), seen


def test_fifth_of_8_judgements_is_the_first_that_can_fix_a_winner() -> None:
    stops = [count for count in range(1, 8) if fixed_after([1.0] * 8, count)]
    assert stops[0] == 5 == fewest_for_a_winner(8)
    assert fewest_for_a_winner(2) == 2


def test_a_liking_for_a_place_fixes_no_winner() -> None:
    assert not any(fixed_after([1.0, 0.0] * 4, count) for count in range(1, 9))
    assert not any(fixed_after([1.0, None] * 4, count) for count in range(1, 9))


def known(*texts: tuple[float, ...]) -> Noise:
    noise = Noise()
    for scores in texts:
        noise.add(scores)
    return noise


def test_two_judgements_that_agree_are_not_taken_for_certain() -> None:
    noise = known((4, 6, 5, 7, 3), (8, 6, 7, 9, 5))  # pooled variance 2.5
    assert noise.standard_error((5, 5)) == pytest.approx((4 * 2.5 / 5 / 2) ** 0.5)
    assert noise.standard_error((5, 5)) > noise.standard_error((5, 5, 5, 5))
    assert noise.standard_error((1, 10)) > noise.standard_error((5, 5))


def test_nothing_is_sure_while_the_noise_or_the_spread_is_unknown() -> None:
    assert not is_sure((5, 5), (2, 9), Noise(), 0.25)
    assert not is_sure((5, 5), (5,), known((5, 5, 5, 5, 5)), 0.25)
    assert not is_sure((5, 5), (5, 5, 5), known((5, 5, 5, 5, 5)), 0.25)
    assert is_sure((5, 5), (5, 9), known((5, 5, 5, 5, 5)), 0.25)
    assert not is_sure((5, 5), (5, 9), known((1, 9, 5, 1, 9)), 0.25)


def group(bench: Any, scores: dict[str, list[int]], **stop: Any) -> tuple[list[JudgeReport], Any]:
    """Siblings judged concurrently; `scores` of each text, by the index of the judgement."""

    def author(prompt: str, context: Any) -> Any:
        text = prompt.rsplit("> ", 1)[1]
        index = int(context.request_id.split("/j")[1].split(".")[0])
        return bench.answer(f"Score: {scores[text][index]}", delay_s=1.0 + index / 10)

    judge, engine = bench.generative(author, num_judgements=8, early_stop=EarlyStopConfig(kind="relaxed", **stop))

    async def go() -> list[JudgeReport]:
        session = judge.open(bench.prompt(), "g0", 1)  # the judge estimates its noise from a first group
        for text in ("calm",):
            await session.judge(*session.add(bench.rollout(text)))
        engine.asked.clear()
        session = judge.open(bench.prompt(), "g1", 3)
        judge_tasks = [
            one
            for sibling, text in enumerate(("bad", "fair", "good"))
            for one in session.add(bench.rollout(text, sibling=sibling, group_id="g1"))
        ]
        reports = await asyncio.gather(*(session.judge(one) for one in judge_tasks))
        return [report for some in reports for report in some.values()]

    return bench.run(go()), engine


CLEAR = {"calm": [5] * 8, "bad": [1, 2] * 4, "fair": [5] * 8, "good": [10] * 8}


def test_clear_scores_stop_early_and_say_what_they_saved(bench: Any) -> None:
    reports, engine = group(bench, CLEAR, audit_share=1e-9)
    assert [report.verdict.score for report in reports] == [1.5, 5, 10]
    assert len(engine.asked) < 24
    asked = [sum(f"/{sibling}/" in context.request_id for context, _ in engine.asked) for sibling in range(3)]
    lengths = [report.judgements[0].completion.num_tokens for report in reports]
    assert [report.saved_tokens for report in reports] == [
        (8 - count) * length for count, length in zip(asked, lengths, strict=True)
    ]
    assert all(report.audit is None for report in reports)


def test_scores_that_scatter_as_widely_as_the_group_are_judged_in_full(bench: Any) -> None:
    noisy = {"calm": [1, 10] * 4, "bad": [1, 9] * 4, "fair": [2, 10] * 4, "good": [3, 10] * 4}
    reports, engine = group(bench, noisy, audit_share=1e-9)
    assert len(engine.asked) == 24
    assert all(report.saved_tokens == 0 for report in reports)


def test_audit_judges_in_full_and_reports_where_it_would_have_stopped(bench: Any) -> None:
    turning = {**CLEAR, "good": [10] * 4 + [6] * 4}
    reports, engine = group(bench, turning, audit_share=1.0)
    assert len(engine.asked) == 24
    audit = reports[2].audit
    assert audit is not None and audit.stopped_after < 8
    assert (audit.stopped_score, audit.full_score) == (10, 8) and reports[2].verdict.score == 8


def test_what_is_in_flight_when_it_is_enough_is_cancelled_at_the_engine(bench: Any) -> None:
    """Two at a time, of which the first is enough."""
    reports, engine = group(bench, CLEAR, audit_share=1e-9, first=1)
    assert engine.in_flight == 0
    assert engine.cancelled
    assert len(engine.asked) == len(engine.cancelled) + sum(len(report.judgements) for report in reports)


def test_audited_list_notes_where_it_would_have_stopped_and_is_judged_in_full(bench: Any) -> None:
    judge, _ = bench.generative(lambda prompt, context: bench.answer("Score: 3"))
    (judgement,) = bench.run(judge.judge(bench.prompt(), bench.rollout("12"))).judgements

    async def ask(index: int) -> list[Judgement]:
        return [replace(judgement, scores=(float(index),))]

    def scores(judgements: Sequence[Judgement]) -> list[float]:
        return [one.scores[0] for one in judgements]

    stop = Stop(first=2, enough=lambda judgements, num_left: scores(judgements) == [0, 1, 2])
    stopped = bench.run(sample_judgements(ask, 8, stop))
    assert (scores(stopped.judgements), stopped.stopped_after) == ([0, 1, 2], 3)
    audited = bench.run(sample_judgements(ask, 8, replace(stop, auditing=True)))
    assert scores(audited.judgements) == list(range(8))
    assert (scores(audited.enough), audited.stopped_after, audited.saved_tokens) == ([0, 1, 2], 3, 0)
