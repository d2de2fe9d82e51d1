"""What a tiny model is taught: prompts with the responses to imitate. Pure: text only, no tokens, no training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.tiny.problems import MAX_TOTAL, Problem, compare, judge_prompt, judgement, make_problems
from models.tiny.solutions import Sloppiness, corrupted_solution, malformed_text, sloppy_solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One user message and the answer that the model learns to give."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A kind of example (a row of LESSONS) and its share in a curriculum."""

    kind: str
    weight: float


def solve(problem: Problem, rng: random.Random) -> Example:
    return Example(prompt=problem.question, response=str(problem.solution))


def solve_sloppily(problem: Problem, rng: random.Random) -> Example:
    return Example(prompt=problem.question, response=str(sloppy_solution(problem, Sloppiness(), rng)))


def drill(problem: Problem, rng: random.Random) -> Example:
    """Equality of numbers alone: without it a judge of this size works the solution out and then says yes to all."""
    pairs = [draw_pair(rng) for _ in range(rng.randint(1, 6))]
    asked = "; ".join(f"{mine} / {theirs}" for mine, theirs in pairs)
    return Example(
        prompt=f"Check: {asked}", response=f"Check: {'; '.join(compare(mine, theirs) for mine, theirs in pairs)}"
    )


def draw_pair(rng: random.Random) -> tuple[int, int]:
    mine = rng.randint(0, MAX_TOTAL)
    return mine, mine if rng.random() < 0.5 else max(0, mine + rng.randint(-6, 6))


def judging(text: str, problem: Problem) -> Example:
    return Example(prompt=judge_prompt(problem.question, text), response=judgement(problem, text))


def judge_right(problem: Problem, rng: random.Random) -> Example:
    return judging(str(problem.solution), problem)


def judge_sloppy(problem: Problem, rng: random.Random) -> Example:
    """From careful to careless: a policy in training passes through all of it."""
    sloppiness = Sloppiness(
        read_minus_as_plus=rng.choice((0.1, 0.3, 0.6)),
        slip=rng.choice((0.03, 0.1)),
        skip=rng.choice((0.03, 0.1)),
        miscopy=rng.choice((0.03, 0.1)),
    )
    return judging(str(sloppy_solution(problem, sloppiness, rng)), problem)


def judge_corrupted(problem: Problem, rng: random.Random) -> Example:
    return judging(str(corrupted_solution(problem, rng)), problem)


def judge_malformed(problem: Problem, rng: random.Random) -> Example:
    return judging(malformed_text(problem, rng), problem)


LESSONS: dict[str, Callable[[Problem, random.Random], Example]] = {
    "solve": solve,
    "solve_sloppily": solve_sloppily,
    "drill": drill,
    "judge_right": judge_right,
    "judge_sloppy": judge_sloppy,
    "judge_corrupted": judge_corrupted,
    "judge_malformed": judge_malformed,
}


def draw_examples(lessons: tuple[Lesson, ...], count: int, seed: int) -> Iterator[Example]:
    """`count` examples in a fixed random order of kinds; each on a problem of its own from the training split."""
    rng = random.Random(f"lessons {seed}")
    kinds, weights = [lesson.kind for lesson in lessons], [lesson.weight for lesson in lessons]
    for problem in make_problems("train", count, seed):
        yield LESSONS[rng.choices(kinds, weights)[0]](problem, rng)
