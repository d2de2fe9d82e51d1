"""Labelled work on the tiny problems, to measure and train judges. Pure: labels by rule, asks no model."""

import random
from dataclasses import dataclass

from grmpipe.tiny.malformed import draw_malformed_text
from grmpipe.tiny.problems import Problem, Split, is_right, make_problems, score_label
from grmpipe.tiny.tasks import SUMS, Write, right_text

NUM_TRIES = 64  # a sloppy solution is sometimes right, most often for a problem of one step
WRONG = {kind: write for kind, write in SUMS.texts.items() if kind != "right"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTexts:
    """A right solution among wrong ones. `kind`: how the wrong ones were made; `list`: one of each kind."""

    problem: Problem
    texts: tuple[str, ...]
    best: int  # index into texts
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """One text and the score that a perfect judge gives it."""

    problem: Problem
    text: str
    score: int
    kind: str


def make_judgements(split: Split, count: int, seed: int) -> tuple[RankedTexts | ScoredText, ...]:
    """`count` items, each on another problem: ranked and scored ones alternate.

    Every second scored text is right; the wrong ones, and the rankings, cycle through the kinds of errors. The place of
    the best in a ranking is random.
    """
    rng = random.Random(f"judgements {split} {seed}")
    problems = make_problems(split, count, seed)
    return tuple(
        (make_ranked if i % 2 == 0 else make_scored)(problem, i // 2, rng) for i, problem in enumerate(problems)
    )


def make_ranked(problem: Problem, turn: int, rng: random.Random) -> RankedTexts:
    kinds = (*WRONG, "list")
    kind = kinds[turn % len(kinds)]
    losers = [wrong_text(problem, WRONG[way], rng) for way in (WRONG if kind == "list" else (kind,))]
    best = rng.randrange(len(losers) + 1)
    texts = (*losers[:best], right_text(problem, rng), *losers[best:])
    return RankedTexts(problem=problem, texts=texts, best=best, kind=kind)


def make_scored(problem: Problem, turn: int, rng: random.Random) -> ScoredText:
    if turn % 2 == 0:
        kind, text = "right", right_text(problem, rng)
    else:
        kind = tuple(WRONG)[turn // 2 % len(WRONG)]
        text = wrong_text(problem, WRONG[kind], rng)
    return ScoredText(problem=problem, text=text, score=score_label(problem, text), kind=kind)


def wrong_text(problem: Problem, write: Write, rng: random.Random) -> str:
    """A text with a wrong final answer, or one that is no solution at all."""
    for _ in range(NUM_TRIES):
        text = write(problem, rng)
        if not is_right(problem, text):
            return text
    return draw_malformed_text(problem, rng)
