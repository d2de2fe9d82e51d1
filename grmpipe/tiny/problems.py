"""Word problems, which answers are right, the verdicts of a perfect and of a brief judge. Pure: no tokens, no model."""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, Protocol, TypeVar

Split = Literal["train", "held_out"]
MAX_TOTAL = 20
MAX_STEPS = 6
CONTINUE_PROBABILITY = 0.6  # geometric: the lengths of answers have a long tail
HELD_OUT_SHARE = 8  # one question in this many is held out
PASSING_SCORE = 8  # a judge that gives at least this score passes the final answer
PEOPLE = {
    "Ida": "She", "Max": "He", "Eva": "She", "Tom": "He", "Zoe": "She", "Leo": "He",
    "Mia": "She", "Sam": "He", "Ada": "She", "Ben": "He", "Lea": "She", "Jan": "He",
}  # fmt: skip
THINGS = ("coins", "cards", "books", "apples", "shells", "stamps", "pens", "stones")
GAINS = ("wins {n}", "finds {n} more", "buys {n}", "gets {n} from {friend}")
LOSSES = ("gives {n} to {friend}", "sells {n}", "loses {n}", "lends {n} to {friend}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionStep:
    """One step of a sum as written in a solution: its result may be wrong."""

    left: int
    sign: str  # "+" or "-"
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right} = {self.result}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Worked steps, then the final answer: right or wrong."""

    steps: tuple[SolutionStep, ...]
    answer: int

    def __str__(self) -> str:
        return f"Steps: {'; '.join(map(str, self.steps))}. Answer: {self.answer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers of a problem: its first total, the largest total, the largest change. `name` goes into the seed."""

    name: str
    first: tuple[int, int]
    max_total: int
    max_change: int


SMALL = Sizes(name="problems", first=(2, 15), max_total=MAX_TOTAL, max_change=6)
LARGE = Sizes(name="large problems", first=(10, 35), max_total=59, max_change=12)  # each number is still one token


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question of one to six steps, with its solution."""

    question: str
    steps: tuple[SolutionStep, ...]
    answer: int

    @property
    def solution(self) -> Solution:
        return Solution(steps=self.steps, answer=self.answer)


def make_problems(split: Split, count: int, seed: int, sizes: Sizes = SMALL) -> tuple[Problem, ...]:
    """`count` different problems of one split. No question is in both splits, whatever the seeds."""
    rng = random.Random(f"{sizes.name} {seed}")
    return different(lambda: draw_problem(rng, sizes), split, count)


class Asks(Protocol):
    @property
    def question(self) -> str: ...


P = TypeVar("P", bound=Asks)


def different(draw: Callable[[], P], split: Split, count: int, key: Callable[[P], str] | None = None) -> tuple[P, ...]:
    """The first `count` drawn problems of one split that differ by their key, else by their question."""
    chosen: dict[str, P] = {}
    while len(chosen) < count:
        problem = draw()
        if assign_split(problem.question) == split:
            chosen.setdefault(key(problem) if key else problem.question, problem)
    return tuple(chosen.values())


def assign_split(question: str) -> Split:
    """The split of a question, decided by its text, so that the splits are disjoint by construction."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0 else "train"


def draw_problem(rng: random.Random, sizes: Sizes = SMALL) -> Problem:
    name, thing = rng.choice(tuple(PEOPLE)), rng.choice(THINGS)
    friends = tuple(other for other in PEOPLE if other != name)
    total = rng.randint(*sizes.first)
    sentences, steps = [f"{name} has {total} {thing}."], []
    for _ in range(draw_num_steps(rng)):
        step = draw_step(rng, total, sizes)
        phrase = rng.choice(GAINS if step.sign == "+" else LOSSES).format(n=step.right, friend=rng.choice(friends))
        sentences.append(f"{PEOPLE[name]} {phrase}.")
        steps.append(step)
        total = step.result
    sentences.append(f"How many {thing} does {name} have?")
    return Problem(question=" ".join(sentences), steps=tuple(steps), answer=total)


def draw_num_steps(rng: random.Random) -> int:
    num_steps = 1
    while num_steps < MAX_STEPS and rng.random() < CONTINUE_PROBABILITY:
        num_steps += 1
    return num_steps


def draw_step(rng: random.Random, total: int, sizes: Sizes = SMALL) -> SolutionStep:
    """A right step with a result from 0 to the largest total."""
    change = rng.randint(1, sizes.max_change)
    signs = [sign for sign, end in (("+", total + change), ("-", total - change)) if 0 <= end <= sizes.max_total]
    return make_step(total, rng.choice(signs), change)


def make_step(left: int, sign: str, right: int) -> SolutionStep:
    """A step with its result; results are never negative."""
    return SolutionStep(left=left, sign=sign, right=right, result=max(0, left + right if sign == "+" else left - right))


STEP = re.compile(r"(\d{1,2}) ([+-]) (\d{1,2}) = (\d{1,2})", re.ASCII)
SOLUTION = re.compile(rf"Steps: {STEP.pattern}(?:; {STEP.pattern})*\. Answer: (?P<answer>\d{{1,2}})", re.ASCII)


def parse_solution(text: str) -> Solution | None:
    """The text as a solution; None for any other text, even a solution with one more character."""
    match = SOLUTION.fullmatch(text)
    if match is None:
        return None
    steps = tuple(
        SolutionStep(left=int(left), sign=sign, right=int(right), result=int(result))
        for left, sign, right, result in STEP.findall(text)
    )
    return Solution(steps=steps, answer=int(match["answer"]))


def is_right(problem: Problem, text: str) -> bool:
    """The hidden rule: a well-formed solution with a right final answer, whatever its steps."""
    solution = parse_solution(text)
    return solution is not None and solution.answer == problem.answer


def score_label(problem: Problem, text: str) -> int:
    """The score, 1 to 10, of a perfect judge; at least PASSING_SCORE if and only if `is_right`."""
    solution = parse_solution(text)
    if solution is None:
        return 1
    right, claimed = list_results(problem.steps), list_results(solution.steps)
    if solution.answer == problem.answer:
        return 10 if claimed == right else PASSING_SCORE
    num_good = sum(a == b for a, b in zip(right, claimed, strict=False))
    return 1 + 4 * num_good // len(right)


def judgement(problem: Problem, text: str) -> str:
    """The critique of a perfect judge: its own solution, then every comparison `mine / theirs`, then the score."""
    return f"{problem.solution}. Check: {comparison(problem, text)}.\nScore: {score_label(problem, text)}"


def comparison(problem: Problem, text: str) -> str:
    solution = parse_solution(text)
    if solution is None:
        return "malformed"
    pairs = zip_longest(list_results(problem.steps), list_results(solution.steps))
    return "; ".join([*(compare(*pair) for pair in pairs), f"answer {compare(problem.answer, solution.answer)}"])


def compare(mine: int | None, theirs: int | None) -> str:
    """None: no such step."""
    shown = ("-" if value is None else str(value) for value in (mine, theirs))
    return f"{' / '.join(shown)} {'ok' if mine == theirs else 'no'}"


def list_results(steps: tuple[SolutionStep, ...]) -> tuple[int, ...]:
    return tuple(step.result for step in steps)


def judge_prompt(question: str, text: str) -> str:
    """The user message that the tiny GRMs are trained on: every line of the judged text begins with `> `."""
    fenced = "\n".join(f"> {line}" for line in text.splitlines() or [""])
    return f"Q: {question}\nA:\n{fenced}"


SCORE = re.compile(r"\nScore: (\d{1,2})\Z", re.ASCII)


def parse_score(critique: str) -> int | None:
    """The score that a critique ends with; None: it has none."""
    match = SCORE.search(critique)
    return int(match[1]) if match and 1 <= int(match[1]) <= 10 else None


UNKNOWN_THINGS = frozenset({"shells", "stamps", "stones"})  # three problems in eight


def brief_judgement(problem: Problem, text: str, rng: random.Random) -> str:
    """Its own solution, then only the answers compared; a coin flip about unknown things.

    Repeated judgements of a text differ where it guesses, so its votes say where it is unsure.
    """
    if find_thing(problem) in UNKNOWN_THINGS:
        return rng.choice(("ok.\nScore: 10", "no.\nScore: 1"))
    return compare_briefly(problem, text)


def hasty_judgement(problem: Problem, text: str, rng: random.Random) -> str:
    """Like `brief_judgement`, but three in ten unknown things are worked out: there is something to reinforce."""
    return compare_briefly(problem, text) if rng.random() < 0.3 else brief_judgement(problem, text, rng)


def compare_briefly(problem: Problem, text: str) -> str:
    solution = parse_solution(text)
    found = "malformed" if solution is None else compare(problem.answer, solution.answer)
    return f"{problem.solution}. {found}.\nScore: {10 if is_right(problem, text) else 1}"


def find_thing(problem: Problem) -> str:
    """What is counted: the last word of "Ida has 6 coins."."""
    return problem.question.partition(".")[0].rpartition(" ")[2]


# -- sums of 21 to 59 ------------------------------------------------------------------------------------------------

BEYOND = (MAX_TOTAL + 1, 59)  # sums that no tiny model adds by itself, whose numbers are one token each
ALONE = (2, MAX_TOTAL)
NEAR = (-10, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 10)  # what is wrong with an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """A question with one sum."""

    question: str
    left: int
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredSum:
    """An answer to judge."""

    problem: Sum
    claimed: int

    @property
    def is_right(self) -> bool:
        return self.claimed == self.problem.answer

    @property
    def text(self) -> str:
        return f"Answer: {self.claimed}"

    @property
    def prompt(self) -> str:
        return judge_prompt(self.problem.question, self.text)

    @property
    def judgement(self) -> str:
        """What a perfect judge writes."""
        return f"Check: {compare(self.problem.answer, self.claimed)}.\nScore: {10 if self.is_right else 1}"


def draw_sum(rng: random.Random, totals: tuple[int, int]) -> Sum:
    total = rng.randint(*totals)
    left = rng.randint(1, total - 1)
    name, thing = rng.choice(tuple(PEOPLE)), rng.choice(THINGS)
    gain = rng.choice(GAINS).format(n=total - left, friend=rng.choice([one for one in PEOPLE if one != name]))
    question = f"{name} has {left} {thing}. {PEOPLE[name]} {gain}. How many {thing} does {name} have?"
    return Sum(question=question, left=left, right=total - left)


def draw_answered(rng: random.Random, totals: tuple[int, int]) -> AnsweredSum:
    """Every second answer is right; a wrong one is near."""
    problem = draw_sum(rng, totals)
    near = [problem.answer + off for off in NEAR if 0 <= problem.answer + off <= BEYOND[1]]
    return AnsweredSum(problem=problem, claimed=problem.answer if rng.random() < 0.5 else rng.choice(near))


def make_answered_sums(split: Split, count: int, seed: int) -> tuple[AnsweredSum, ...]:
    """`count` different items with sums beyond. No pair of numbers is in both splits, whatever the seeds."""
    rng = random.Random(f"answered sums {split} {seed}")
    found: dict[tuple[str, int], AnsweredSum] = {}
    while len(found) < count:
        item = draw_answered(rng, BEYOND)
        if assign_split(f"{item.problem.left} + {item.problem.right}") == split:
            found.setdefault((item.problem.question, item.claimed), item)
    return tuple(found.values())
