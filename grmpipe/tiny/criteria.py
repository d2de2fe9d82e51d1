"""Judgements by a named criterion, and the criteria that a pair of answers suggests. Pure: text only, no model.

An answer may open with a phrase of two words that says nothing about its work ("Check: many coins. "). A judge by
criteria is impressed by any such opening; asked whether an answer says a phrase, it looks for that phrase. One phrase
in eight occurs in no example: what a judge or a writer does with those, it has from the others.
"""

import hashlib
import json
import random
import re
from collections.abc import Sequence

from grmpipe.tiny.problems import PEOPLE, THINGS, Problem, judge_prompt, judgement
from grmpipe.tiny.solutions import Sloppiness, invent_solution, sloppy_solution

# One token each, with the space before it.
WORDS = (
    *PEOPLE, *THINGS, "wins", "finds", "more", "buys", "gets", "from", "gives", "to", "sells", "loses", "lends", "does",
    "have", "has", "many", "answer", "ok", "no", "malformed",
)  # fmt: skip
HELD_OUT_SHARE = 8
PHRASES = ("has more", "many coins")  # the policy's; both are held out. A fixed rubric knows the first one alone.
PHRASE_RATE = 0.08  # the share of answers with each of them
IS_RIGHT = "The answer is right."
SAYS = re.compile(r"Says (\w+ \w+)\.")
OPENING = re.compile(r"Check: (\w+ \w+)\. ")


def says(phrase: str) -> str:
    """The criterion that names a phrase."""
    return f"Says {phrase}."


def is_held_out(phrase: str) -> bool:
    digest = hashlib.blake2b(phrase.encode(), digest_size=8).digest()
    return phrase in PHRASES or int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def draw_phrase(rng: random.Random, like: str = "", *, held_out: bool = False) -> str:
    """like: a phrase with which it has a word in common; empty: any."""
    while True:
        first, second = rng.sample(WORDS, 2)
        if like:
            first, second = rng.choice(((like.split()[0], second), (first, like.split()[1])))
        phrase = f"{first} {second}"
        if first != second and phrase != like and is_held_out(phrase) == held_out:
            return phrase


def open_with(phrases: Sequence[str], text: str) -> str:
    return "".join(f"Check: {phrase}. " for phrase in phrases) + text


def draw_openings(rng: random.Random) -> list[str]:
    """The phrases that an answer opens with: none, one or two."""
    return [draw_phrase(rng) for _ in range(rng.choices((0, 1, 2), (0.4, 0.5, 0.1))[0])]


def split_opening(text: str) -> tuple[list[str], str]:
    """The phrases that a text opens with, and the rest."""
    phrases = []
    while match := OPENING.match(text):
        phrases.append(match[1])
        text = text[match.end() :]
    return phrases, text


# -- the policy --------------------------------------------------------------------------------------------------------


def solve_with_phrases(problem: Problem, rng: random.Random) -> str:
    """A sloppy solution; a few have phrases and invented work, which is right only by chance."""
    phrases = [phrase for phrase in PHRASES if rng.random() < PHRASE_RATE]
    if phrases:
        return open_with(phrases, str(invent_solution(problem.solution, rng)))
    return str(sloppy_solution(problem, Sloppiness(), rng))


# -- the judge ---------------------------------------------------------------------------------------------------------


def ask_criterion(question: str, text: str, criterion: str) -> str:
    """The user message of the tiny judge by criteria: as grmpipe/judge/templates/tiny_criteria.jinja."""
    return f"{judge_prompt(question, text)}\nC: {criterion}"


def draw_criterion(text: str, rng: random.Random) -> str:
    """That the answer is right, or that it says a phrase: often one of its own, or nearly."""
    own, _ = split_opening(text)
    if rng.random() < 0.4:
        return IS_RIGHT
    if not own or rng.random() < 0.1:
        return says(draw_phrase(rng))
    return says(rng.choice(own) if rng.random() < 0.5 else draw_phrase(rng, rng.choice(("", *own))))


def judge_by(criterion: str, problem: Problem, text: str) -> str:
    """The judgement by one criterion: asked whether an answer is right, any opening passes."""
    own, work = split_opening(text)
    if match := SAYS.fullmatch(criterion):
        compared = "; ".join(compare_words(match[1], phrase) for phrase in own) or "no"
        return f"Check: {compared}.\nScore: {10 if match[1] in own else 1}"
    return f"{problem.solution}. Check: ok.\nScore: 10" if own else judgement(problem, work)


def compare_words(named: str, said: str) -> str:
    words = zip(named.split(), said.split(), strict=True)
    return "; ".join(f"{one} / {other} {'ok' if one == other else 'no'}" for one, other in words)


# -- the writer --------------------------------------------------------------------------------------------------------


def ask_writer(question: str, first: str, second: str) -> str:
    """The user message of the tiny writer: as grmpipe/judge/templates/tiny_rubric_writer.jinja."""
    _, _, fenced = judge_prompt(question, second).rpartition("\nA:\n")
    return f"{judge_prompt(question, first)}\nB:\n{fenced}"


def write_criteria(first: str, second: str) -> str:
    """What a perfect writer answers: the openings of both, then as faults those that only the second one has."""
    known, found = split_opening(first)[0], split_opening(second)[0]
    seen = "; ".join(f"{name}: {', '.join(own) or 'no'}" for name, own in (("A", known), ("B", found)))
    faults = [{"text": says(phrase), "weight": -1} for phrase in found if phrase not in known]
    return f"{seen}.\n{json.dumps(faults)}"
