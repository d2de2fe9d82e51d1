"""Walks through a key-value store: the right way, the wrong ways, the texts."""

from __future__ import annotations

import random
from statistics import fmean

from grmpipe.tiny.problems import PEOPLE
from grmpipe.tiny.walks import (
    MAX_ENTRIES,
    MAX_HOPS,
    MAX_VISITS,
    MIN_HOPS,
    Haste,
    entry_to_take,
    final,
    format_entries,
    hasty_turns,
    make_walks,
    name_visited,
    right_turns,
)


def test_the_entries_with_the_asked_pronoun_lead_to_the_answer() -> None:
    for walk in make_walks("train", 500, 0):
        for name, after in zip(walk.path, [*walk.path[1:], walk.answer], strict=True):
            assert entry_to_take(walk, name) == after
            names = [entry for entry in walk.graph[name] if isinstance(entry, str)]
            assert sum(PEOPLE[one] == walk.pronoun for one in names) == isinstance(after, str)


def test_walks_have_2_to_6_hops_and_1_to_3_entries_and_no_name_leads_nowhere() -> None:
    walks = make_walks("train", 500, 1)
    assert {len(walk.path) - 1 for walk in walks} == set(range(MIN_HOPS, MAX_HOPS + 1))
    entries = [some for walk in walks for some in walk.graph.values()]
    assert {len(some) for some in entries} == set(range(1, MAX_ENTRIES + 1))
    for walk in walks:
        named = {entry for some in walk.graph.values() for entry in some if isinstance(entry, str)}
        assert named <= set(walk.graph)


def test_no_way_leads_back_to_the_right_walk() -> None:
    for walk in make_walks("train", 500, 2):
        for name, entries in walk.graph.items():
            right = entry_to_take(walk, name) if name in walk.path else None
            assert {entry for entry in entries if entry != right}.isdisjoint(walk.path)


def test_splits_share_no_question_and_walks_are_all_different() -> None:
    train, held_out = make_walks("train", 2000, 3), make_walks("held_out", 500, 4)
    assert {walk.question for walk in train}.isdisjoint(walk.question for walk in held_out)
    assert len({f"{walk.question} {walk.graph}" for walk in train}) == 2000
    assert train[:50] == make_walks("train", 50, 3) != make_walks("train", 50, 5)


def test_entries_are_shown_in_words_and_a_turn_names_whom_it_visits() -> None:
    assert format_entries("Ida", ("Tom", 17)) == "Ida: Tom; 17."
    assert name_visited(" Tom") == "Tom"
    assert [name_visited(turn) for turn in (" Bob", " 17", "Tom", "Ida: Tom.")] == [None] * 4


def test_without_haste_a_walk_is_right_and_with_haste_most_often_wrong() -> None:
    rng, walks = random.Random(0), make_walks("train", 1000, 6)
    careful = Haste(first_entry=0.0, guess=0.0)
    assert all(hasty_turns(walk, careful, rng) == right_turns(walk) for walk in walks)
    hasty = [hasty_turns(walk, Haste(), rng) for walk in walks]
    assert 0.3 < fmean(turns[-1] == final(walk) for walk, turns in zip(walks, hasty, strict=True)) < 0.5
    assert max(len(turns) for turns in hasty) <= MAX_VISITS + 1
