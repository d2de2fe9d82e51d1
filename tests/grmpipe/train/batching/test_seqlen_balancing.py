"""Ranks wait for the slowest of a round: how little, for typical lengths of rollouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.train.batching.seqlen_balancing import Load, RankWork, deal, fill, work


def long_tailed(seed: int, number: int = 128) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(7.0, 1.0, number)
    return np.clip(drawn, 16, 16_384).astype(int).tolist()


def loads(lengths: list[int]) -> list[Load]:
    return [Load(tokens=length, work=work(length)) for length in lengths]


def imbalance(lengths: list[int], rounds: list[list[list[int]]]) -> float:
    done = RankWork()
    for by_rank in rounds:
        done.add([sum(work(lengths[place]) for place in places) for places in by_rank])
    return done.imbalance


def full_rounds(lengths: list[int], max_tokens: int, world_size: int) -> list[list[list[int]]]:
    """Fill each round, which leaves a small last one."""
    places, rounds = list(range(len(lengths))), []
    while places:
        by_rank, left = fill(loads([lengths[place] for place in places]), max_tokens, world_size)
        rounds.append([[places[place] for place in own] for own in by_rank])
        places = [places[place] for place in left]
    return rounds


@given(st.lists(st.integers(2, 400), min_size=1, max_size=60), st.integers(1, 5), st.integers(2, 500))
def test_all_is_dealt_once_within_the_limit_and_in_no_more_rounds_than_full_ones(
    lengths: list[int], world_size: int, max_tokens: int
) -> None:
    rounds = deal(loads(lengths), max_tokens, world_size)
    assert sorted(place for by_rank in rounds for places in by_rank for place in places) == list(range(len(lengths)))
    assert {len(by_rank) for by_rank in rounds} == {world_size}
    for places in (places for by_rank in rounds for places in by_rank):
        assert len(places) <= 1 or sum(lengths[place] for place in places) <= max_tokens
    assert len(rounds) == len(full_rounds(lengths, max_tokens, world_size))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_whole_batch_is_dealt_more_evenly_than_by_full_rounds(world_size: int) -> None:
    """For long-tailed lengths: about half the wait of full rounds, and at most 3 % of a step."""
    even, full = [], []
    for seed in range(10):
        lengths = long_tailed(seed)
        even.append(imbalance(lengths, deal(loads(lengths), 16_384, world_size)) - 1)
        full.append(imbalance(lengths, full_rounds(lengths, 16_384, world_size)) - 1)
    assert np.mean(even) < 0.6 * np.mean(full)
    assert np.mean(even) < 0.03


def test_samples_in_order_would_leave_ranks_waiting() -> None:
    """The result of dealing groups in order."""
    lengths = long_tailed(0)
    in_turn = [[list(range(rank, len(lengths), 4)) for rank in range(4)]]
    assert imbalance(lengths, in_turn) > 1.15 > 1.05 > imbalance(lengths, deal(loads(lengths), 1 << 20, 4))


def test_a_long_sample_is_more_work_than_as_many_tokens_in_short_ones() -> None:
    assert work(32_768) == 2 * 32_768
    by_rank, _ = fill(loads([8192, *[512] * 18]), 10_000, 2)
    tokens = [sum([8192, *[512] * 18][place] for place in places) for places in by_rank]
    assert tokens == [8192, 9216]  # by tokens alone the short ones would be 512 more, next to the long one


def test_a_sample_after_its_prefix_and_the_prefix_are_as_much_work_as_both_together() -> None:
    assert work(3000) + work(5000, before=3000) == pytest.approx(work(8000))


def test_a_rank_gets_all_of_its_share_and_more_only_if_another_has_more_already() -> None:
    assert fill(loads([100] * 3), 1000, 1, share=2 * work(100)) == ([[0, 1]], [2])
    assert fill(loads([400, 100, 100]), 1000, 2, share=work(100)) == ([[0], [1, 2]], [])


def test_rounds_are_filled_where_even_shares_would_need_one_more() -> None:
    """Of 19 tokens 9.5 a round: 7 | 5, 3 | 4."""
    assert deal(loads([4, 7, 3, 5]), 11, 1) == [[[1, 0]], [[3, 2]]]


def test_imbalance_is_the_time_of_all_rounds_over_that_without_waiting() -> None:
    """Slowest ranks 3 and 2, means 2 and 2."""
    done = RankWork()
    done.add([3.0, 1.0])
    done.add([2.0, 2.0])
    assert done.imbalance == 5 / 4


def test_empty_batch_is_balanced() -> None:
    assert RankWork().imbalance == 1.0 and deal([], 10, 2) == []
