"""Requests go to the engine with the least load, siblings to the one with their prompt, unless its load is far
greater.
"""

from __future__ import annotations

import random

import pytest

from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import SamplingParams
from grmpipe.scheduler.events import NoEvents
from grmpipe.scheduler.routing import load
from grmpipe.scheduler.routing.load import SIBLINGS_AHEAD, LoadEstimate
from grmpipe.scheduler.routing.members import RoleMembers

SHORT, LONG = SamplingParams(max_new_tokens=10), SamplingParams(max_new_tokens=1000)
ENGINES = {name: SimulatedEngine("policy", lambda *asked: Script(token_ids=(), text="")) for name in "ab"}


def two_engines() -> RoleMembers:
    return RoleMembers("policy", ENGINES, NoEvents())


def test_a_long_request_weighs_as_much_as_many_short_ones() -> None:
    work = LoadEstimate(two_engines())
    assert work.place("g", (1,) * 10, LONG) == ("a", 1010)
    assert [work.place(f"g{n}", (1,) * 10, SHORT)[0] for n in range(50)] == ["b"] * 50
    assert work["b"] == 1000


def test_lengths_are_learned_from_answers_and_never_exceed_what_is_allowed() -> None:
    work = LoadEstimate(two_engines())
    assert work.new_tokens(LONG) == 1000
    for _ in range(300):
        work.record_end(50)
    assert work.new_tokens(LONG) == pytest.approx(50)
    assert work.new_tokens(SHORT) == 10


def test_a_sibling_with_the_same_prompt_costs_its_home_the_answer_alone() -> None:
    work = LoadEstimate(two_engines())
    prompt = (1,) * 500
    home, first = work.place("g", prompt, SHORT)
    again, second = work.place("g", prompt, SHORT)
    assert (home, again) == ("a", "a")
    assert (first, second) == (510, 10)
    assert work.place("g", (2,) * 500, SHORT) == ("b", 510)  # another prompt isn't cached: a has far more load


def test_siblings_part_when_their_home_is_far_behind_and_the_rest_follows_the_one_that_left() -> None:
    work = LoadEstimate(two_engines())
    places = [work.place("g", (1,), SHORT)[0] for _ in range(3 * SIBLINGS_AHEAD)]
    assert places[: SIBLINGS_AHEAD + 1] == ["a"] * (SIBLINGS_AHEAD + 1)
    assert places[SIBLINGS_AHEAD + 2] == "b"


def test_finished_requests_add_no_load_and_a_lost_engine_gets_no_request() -> None:
    members = two_engines()
    work = LoadEstimate(members)
    name, tokens = work.place("g", (1, 2), SHORT)
    work.add(name, -tokens)
    assert work[name] == 0
    members.deactivate("a")
    assert work.place("g", (1, 2), SHORT) == ("b", 12)
    members.activate("a", ENGINES["a"])
    assert work.place_anywhere((1, 2), SHORT) == ("a", 12)


def test_a_turn_goes_where_its_trajectory_is_cached_and_costs_the_new_tokens_alone() -> None:
    work = LoadEstimate(two_engines())
    prompt = (1,) * 500
    assert work.place("g", prompt, SHORT, trajectory_id="g/0") == ("a", 510)
    work.keeps("b", "g/0", 505)  # it was migrated
    assert work.place("g", (*prompt, 2, 2, 2, 2, 2, 3, 3), SHORT, trajectory_id="g/0") == ("b", 12)
    assert work.place("g", prompt, SHORT, trajectory_id="g/1") == ("a", 10), "its siblings stay where they are"


def test_a_turn_leaves_its_home_when_that_has_more_load_than_a_prefill_costs() -> None:
    work = LoadEstimate(two_engines())
    work.keeps("a", "g/0", 500)
    ahead = SIBLINGS_AHEAD * 10 + 500
    work.add("a", ahead)
    assert work["a"] == ahead
    assert work.place("g", (1,) * 510, SHORT, trajectory_id="g/0") == ("a", 20)
    assert work.place("g", (1,) * 510, SHORT, trajectory_id="g/0") == ("b", 520)


def test_an_engine_that_served_another_role_or_died_meanwhile_is_no_home_any_more() -> None:
    members = two_engines()
    work = LoadEstimate(members)
    work.keeps("a", "g/0", 500)
    members.deactivate("a")
    assert work.place("g", (1,) * 510, SHORT, trajectory_id="g/0") == ("b", 520)
    members.activate("a", ENGINES["a"])
    assert work.place("h", (1,) * 510, SHORT, trajectory_id="g/0") == ("a", 520), "nothing of it is cached"


def test_the_trajectories_without_a_turn_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TRAJECTORIES_REMEMBERED", 2)
    work = LoadEstimate(two_engines())
    for trajectory_id in ("old", "young", "old", "new"):
        work.keeps("b", trajectory_id, 500)
    places = [work.place(name, (1,) * 500, SHORT, trajectory_id=name)[1] for name in ("young", "old", "new")]
    assert places == [510, 10, 10]


def test_the_least_loaded_is_found_among_many_whatever_came_and_went() -> None:
    """Ties go to the one that has served longest."""
    dice, names = random.Random(0), [f"e{n}" for n in range(20)]
    engine = ENGINES["a"]
    members = RoleMembers("policy", dict.fromkeys(names, engine), NoEvents())
    work, taken = LoadEstimate(members), list[tuple[str, float]]()
    for _ in range(3000):
        expected = min(members.serving, key=work.__getitem__)
        placed = work.place_anywhere((1,) * dice.randrange(4), SHORT)
        assert placed[0] == expected
        taken.append(placed)
        while dice.random() < 0.6 and taken:
            name, tokens = taken.pop(dice.randrange(len(taken)))
            work.add(name, -tokens)
        if dice.random() < 0.1:
            some = dice.choice(names)
            members.deactivate(some) if some in members.serving else members.activate(some, engine)
        if not members.serving:
            members.activate(names[0], engine)
