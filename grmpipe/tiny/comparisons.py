"""Comparisons, a second kind of task: how many things the person with the most has. Pure: no tokens, no model, no
files.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from grmpipe.tiny.problems import PEOPLE, THINGS, Split, assign_split, compare, different
from grmpipe.tiny.solutions import elsewhere

LARGEST = 40
MAX_PEOPLE = 6
MISREAD = 0.35  # the probability that a sloppy writer takes the smaller of two numbers for the larger
MISCOPY = 0.06  # and that it copies another number


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A question with the numbers in it; the answer is the largest."""

    question: str
    numbers: tuple[int, ...]

    @property
    def answer(self) -> int:
        return max(self.numbers)

    @property
    def solution(self) -> str:
        return write_solution(self.largest_so_far)

    @property
    def largest_so_far(self) -> tuple[int, ...]:
        return tuple(accumulate(self.numbers, max))


def make_comparisons(split: Split, count: int, seed: int) -> tuple[Comparison, ...]:
    """`count` different comparisons of one split. No question is in both splits, whatever the seeds."""
    rng = random.Random(f"comparisons {seed}")
    return different(lambda: draw_comparison(rng), split, count)


def draw_training_comparison(rng: random.Random) -> Comparison:
    """A comparison of the training split."""
    while assign_split((comparison := draw_comparison(rng)).question) != "train":
        pass
    return comparison


def draw_comparison(rng: random.Random) -> Comparison:
    thing, people = rng.choice(THINGS), rng.sample(tuple(PEOPLE), rng.randint(2, MAX_PEOPLE))
    numbers = tuple(rng.sample(range(1, LARGEST + 1), len(people)))
    facts = " ".join(f"{name} has {number} {thing}." for name, number in zip(people, numbers, strict=True))
    return Comparison(question=f"{facts} How many {thing} does the one with more have?", numbers=numbers)


def write_solution(largest: Sequence[int], answer: int | None = None) -> str:
    """A solution: the largest number so far, person by person, then the answer."""
    return f"More: {'; '.join(map(str, largest))}. Answer: {largest[-1] if answer is None else answer}"


SOLUTION = re.compile(r"More: \d{1,2}(?:; \d{1,2})*\. Answer: (?P<answer>\d{1,2})", re.ASCII)


def answer_in(text: str) -> int | None:
    """The answer of a well-formed solution; None for any other text."""
    match = SOLUTION.fullmatch(text)
    return match and int(match["answer"])


def compares_right(comparison: Comparison, text: str) -> bool:
    """The hidden rule: a well-formed solution with a right answer, whatever stands before it."""
    return answer_in(text) == comparison.answer


def comparison_judgement(comparison: Comparison, text: str) -> str:
    """The critique of a perfect judge: its own solution, the answers compared, then the score."""
    answer = answer_in(text)
    check = "malformed" if answer is None else f"answer {compare(comparison.answer, answer)}"
    return f"{comparison.solution}. Check: {check}.\nScore: {10 if compares_right(comparison, text) else 1}"


def sloppy_comparison(comparison: Comparison, misread: float, rng: random.Random) -> str:
    """A solution that may take a smaller number for the largest so far, or copy another number."""
    read = [elsewhere(number, rng) if rng.random() < MISCOPY else number for number in comparison.numbers]
    largest = [read[0]]
    for number in read[1:]:
        pair = sorted((largest[-1], number))
        largest.append(pair[0 if rng.random() < misread else 1])
    return write_solution(largest)


def invent_comparison(comparison: Comparison, rng: random.Random) -> str:
    """A solution in which, from some person on, a number that no person has counts as the largest."""
    number = rng.choice([number for number in range(1, LARGEST + 10) if number not in comparison.numbers])
    right = comparison.largest_so_far[: rng.randrange(len(comparison.numbers))]
    return write_solution((*right, *[max(number, *right, 0)] * (len(comparison.numbers) - len(right))))


def corrupt_comparison(comparison: Comparison, rng: random.Random) -> str:
    """Another answer after right work, or no solution at all."""
    right = comparison.solution
    other = rng.choice((rng.choice(comparison.numbers), elsewhere(comparison.answer, rng)))
    return rng.choice(
        (
            write_solution(comparison.largest_so_far, other),
            write_solution(comparison.largest_so_far, other),
            f"Answer: {comparison.answer}",
            right[: rng.randrange(len(right))],
            f"{right}{rng.choice((' ok', '.', f' {comparison.answer}', '; 3'))}",
            right.replace("More", "Steps"),
        )
    )
