"""Questions that one word answers, and the reward of an answer."""

from __future__ import annotations

import re

import pytest
import xxhash

from grmpipe.data.catalogs import find_catalog
from grmpipe.tiny.short_answers import QUESTIONS, make_short_questions, right_and_brief


def test_the_splits_share_nothing_that_is_asked_or_answered() -> None:
    words = {
        split: {word.casefold() for _, pairs in QUESTIONS.values() for word in re.findall(r"[\w-]+", pairs[split])}
        for split in ("train", "held_out")
    }
    assert words["train"] and not words["train"] & words["held_out"]


def test_the_questions_are_those_that_the_published_figures_were_measured_with() -> None:
    questions = {split: make_short_questions(split) for split in ("train", "held_out")}
    assert {split: len(rows) for split, rows in questions.items()} == {"train": 174, "held_out": 128}
    text = "\n".join(f"{row.question} {row.answer}" for rows in questions.values() for row in rows)
    assert xxhash.xxh3_64_hexdigest(text.encode()) == "d9f1f1cabf34daf4"


def test_a_question_is_asked_once_and_each_kind_is_among_the_first() -> None:
    rows = make_short_questions("held_out")
    assert len({row.question for row in rows}) == len(rows)
    assert {row.kind for row in rows[:32]} == set(QUESTIONS)


def test_a_set_of_facts_gives_no_more_prompts_than_it_has() -> None:
    path = "tiny://short_answers/held_out"
    catalog = find_catalog(path)
    assert catalog is not None
    prompts = catalog.make_prompts(path, 4096, seed=7)
    assert len(prompts) == 128 and prompts[:5] == catalog.make_prompts(path, 5, seed=0)
    assert {prompt.source for prompt in prompts} == set(QUESTIONS)


@pytest.mark.parametrize(
    ("response", "reward"),
    [("Paris", 1), ("paris.", 1), ("It's Paris.", 1 / 2), ("The capital is Paris", 1 / 4), ("Lyon", 0), ("", 0)],
)
def test_the_reward_falls_with_each_further_word(response: str, reward: float) -> None:
    assert right_and_brief(response, "Paris") == pytest.approx(reward)
