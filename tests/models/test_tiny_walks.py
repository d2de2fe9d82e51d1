"""Walks through a key-value store: the right way, the wrong ways, the texts."""

from __future__ import annotations

import random
from statistics import fmean

from models.tiny.walks import (
    MAX_ENTRIES,
    MAX_HOPS,
    MAX_VISITS,
    MIN_HOPS,
    Haste,
    final,
    hasty_turns,
    make_walks,
    name_visited,
    right_turns,
    shown,
)


def test_the_entries_of_the_asked_thing_lead_to_the_answer() -> None:
    for walk in make_walks("train", 500, 0):
        for name, after in zip(walk.path, [*walk.path[1:], walk.answer], strict=True):
            assert walk.graph[name][walk.thing] == after


def test_walks_have_2_to_6_hops_and_1_to_3_entries_and_no_name_leads_nowhere() -> None:
    walks = make_walks("train", 500, 1)
    assert {len(walk.path) - 1 for walk in walks} == set(range(MIN_HOPS, MAX_HOPS + 1))
    entries = [some for walk in walks for some in walk.graph.values()]
    assert {len(some) for some in entries} == set(range(1, MAX_ENTRIES + 1))
    for walk in walks:
        named = {entry for some in walk.graph.values() for entry in some.values() if isinstance(entry, str)}
        assert named <= set(walk.graph)


def test_no_way_leads_back_to_the_right_walk() -> None:
    for walk in make_walks("train", 500, 2):
        for name, entries in walk.graph.items():
            others = {entry for thing, entry in entries.items() if name not in walk.path or thing != walk.thing}
            assert others.isdisjoint(walk.path)


def test_splits_share_no_question_and_walks_are_all_different() -> None:
    train, held_out = make_walks("train", 2000, 3), make_walks("held_out", 500, 4)
    assert {walk.question for walk in train}.isdisjoint(walk.question for walk in held_out)
    assert len({f"{walk.question} {walk.graph}" for walk in train}) == 2000
    assert train[:50] == make_walks("train", 50, 3) != make_walks("train", 50, 5)


def test_entries_are_shown_in_words_and_a_turn_names_whom_it_visits() -> None:
    assert shown("Ida", {"coins": "Tom", "books": 17}) == "Ida has coins from Tom; 17 books."
    assert name_visited(" get Tom") == "Tom"
    assert name_visited("get Tom") is None and name_visited(" get Bob") is None and name_visited("Answer: 17") is None


def test_without_haste_a_walk_is_right_and_with_haste_most_often_wrong() -> None:
    rng, walks = random.Random(0), make_walks("train", 1000, 6)
    careful = Haste(first_entry=0.0, guess=0.0)
    assert all(hasty_turns(walk, careful, rng) == right_turns(walk) for walk in walks)
    hasty = [hasty_turns(walk, Haste(), rng) for walk in walks]
    assert 0.3 < fmean(turns[-1] == final(walk) for walk, turns in zip(walks, hasty, strict=True)) < 0.5
    assert max(len(turns) for turns in hasty) <= MAX_VISITS + 1
