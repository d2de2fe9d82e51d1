"""Requests go to the engine with the least load, siblings to the one with their prompt, unless its load is far
greater.
"""

from __future__ import annotations

import pytest

from models.types import SamplingParams
from scheduler.routing.expected_load import SIBLINGS_AHEAD, LoadEstimate

SHORT, LONG = SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=1000)


def test_a_long_request_weighs_as_much_as_many_short_ones() -> None:
    work = LoadEstimate("ab")
    assert work.place("g", (1,) * 10, LONG) == ("a", 1010)
    assert [work.place(f"g{n}", (1,) * 10, SHORT)[0] for n in range(50)] == ["b"] * 50
    assert work["b"] == 1000


def test_lengths_are_learned_from_answers_and_never_exceed_what_is_allowed() -> None:
    work = LoadEstimate("ab")
    assert work.new_tokens(LONG) == 1000
    for _ in range(300):
        work.ended(50)
    assert work.new_tokens(LONG) == pytest.approx(50)
    assert work.new_tokens(SHORT) == 10


def test_a_sibling_with_the_same_prompt_costs_its_home_the_answer_alone() -> None:
    work = LoadEstimate("ab")
    prompt = (1,) * 500
    home, first = work.place("g", prompt, SHORT)
    again, second = work.place("g", prompt, SHORT)
    assert (home, again) == ("a", "a")
    assert (first, second) == (510, 10)
    assert work.place("g", (2,) * 500, SHORT) == ("b", 510)  # another prompt isn't cached: a has far more load


def test_siblings_part_when_their_home_is_far_behind_and_the_rest_follows_the_one_that_left() -> None:
    work = LoadEstimate("ab")
    places = [work.place("g", (1,), SHORT)[0] for _ in range(3 * SIBLINGS_AHEAD)]
    assert places[: SIBLINGS_AHEAD + 1] == ["a"] * (SIBLINGS_AHEAD + 1)
    assert places[SIBLINGS_AHEAD + 2] == "b"


def test_what_has_left_weighs_nothing_and_an_engine_that_is_gone_is_no_home() -> None:
    work = LoadEstimate("ab")
    name, tokens = work.place("g", (1, 2), SHORT)
    work.give_back(name, tokens)
    assert work[name] == 0
    assert work.place("g", (1, 2), SHORT, among=["b"]) == ("b", 12)
    work.went("a")
    assert work.place("h", (1, 2), SHORT) == ("b", 12)
    work.came("a")
    assert work.place_anywhere((1, 2), SHORT) == ("a", 12)
