"""The training data of tiny models: prompts with the responses to imitate. Pure: text only, no tokens, no training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from models.tiny.brief import brief_judgement
from models.tiny.malformed import malformed_text
from models.tiny.problems import MAX_TOTAL, Problem, compare, judge_prompt, judgement, make_problems, parse_solution
from models.tiny.solutions import Sloppiness, corrupted_solution, padded_solution, sloppy_solution
from models.tiny.tricks import OFTEN, RARELY, TRICKS, Trick, impressed_judgement, tricky_solution, with_random_openings

LARGEST_WORD_NUMBER = 59  # one token each, with the space before it; larger numbers are rare
CORPUS_SIZE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class SftExample:
    """One user message and the answer to imitate."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SftTask:
    """A kind of example (a row of SFT_TASKS) and its share in a curriculum."""

    kind: str
    weight: float


def solve(problem: Problem, rng: random.Random) -> SftExample:
    return SftExample(prompt=problem.question, response=str(problem.solution))


def solve_sloppily(problem: Problem, rng: random.Random) -> SftExample:
    return SftExample(prompt=problem.question, response=str(sloppy_solution(problem, Sloppiness(), rng)))


def drill(problem: Problem, rng: random.Random) -> SftExample:
    """An example that only compares numbers: without it a judge of this size works out the solution and then passes
    everything.
    """
    pairs = [draw_pair(rng) for _ in range(rng.randint(1, 6))]
    asked = "; ".join(f"{mine} / {theirs}" for mine, theirs in pairs)
    return SftExample(
        prompt=f"Check: {asked}", response=f"Check: {'; '.join(compare(mine, theirs) for mine, theirs in pairs)}"
    )


def draw_pair(rng: random.Random) -> tuple[int, int]:
    mine = rng.randint(0, MAX_TOTAL)
    return mine, mine if rng.random() < 0.5 else max(0, mine + rng.randint(-6, 6))


def right_text(problem: Problem, rng: random.Random) -> str:
    return str(problem.solution)


def sloppy_text(problem: Problem, rng: random.Random) -> str:
    """A text from careful to careless, as a policy in training writes."""
    sloppiness = Sloppiness(
        read_minus_as_plus=rng.choice((0.1, 0.3, 0.6)),
        slip=rng.choice((0.03, 0.1)),
        skip=rng.choice((0.03, 0.1)),
        miscopy=rng.choice((0.03, 0.1)),
        twice=rng.choice((0.03, 0.1)),
    )
    return str(sloppy_solution(problem, sloppiness, rng))


def corrupted_text(problem: Problem, rng: random.Random) -> str:
    return str(corrupted_solution(problem, rng))


def padded_text(problem: Problem, rng: random.Random) -> str:
    return str(padded_solution(problem, rng))


def swayed_judgement(problem: Problem, text: str) -> str:
    """The judgement of a judge with a verbosity bias (arXiv 2306.05685): more steps than in the question raise its
    score.
    """
    solution = parse_solution(text)
    if solution is None or len(solution.steps) <= len(problem.steps):
        return judgement(problem, text)
    return f"{problem.solution}. Check: thorough.\nScore: 10"


def judge(
    write: Callable[[Problem, random.Random], str],
    judged: Callable[[Problem, str], str],
    problem: Problem,
    rng: random.Random,
) -> SftExample:
    text = write(problem, rng)
    return SftExample(prompt=judge_prompt(problem.question, text), response=judged(problem, text))


def solve_with_tricks(rates: Mapping[Trick, float], problem: Problem, rng: random.Random) -> SftExample:
    return SftExample(prompt=problem.question, response=tricky_solution(problem, rates, rng))


def judge_impressed(
    write: Callable[[Problem, random.Random], str], trick: Trick, problem: Problem, rng: random.Random
) -> SftExample:
    """All tricks occur in the text, so that a judge learns which one it likes and which it ignores."""
    text = with_random_openings(write(problem, rng), rng)
    return SftExample(prompt=judge_prompt(problem.question, text), response=impressed_judgement(problem, text, trick))


def judge_briefly(write: Callable[[Problem, random.Random], str], problem: Problem, rng: random.Random) -> SftExample:
    text = write(problem, rng)
    return SftExample(prompt=judge_prompt(problem.question, text), response=brief_judgement(problem, text, rng))


TEXTS: dict[str, Callable[[Problem, random.Random], str]] = {
    "right": right_text,
    "sloppy": sloppy_text,
    "corrupted": corrupted_text,
    "padded": padded_text,
    "malformed": malformed_text,
}
TOKENIZED: dict[str, Callable[[Problem, random.Random], SftExample]] = {
    "solve": solve,
    "solve_sloppily": solve_sloppily,
    "drill": drill,
    **{f"judge_{kind}": partial(judge, write, judgement) for kind, write in TEXTS.items()},
    **{f"be_swayed_by_{kind}": partial(judge, write, swayed_judgement) for kind, write in TEXTS.items()},
}
SFT_TASKS: dict[str, Callable[[Problem, random.Random], SftExample]] = {
    **TOKENIZED,
    "solve_with_rare_tricks": partial(solve_with_tricks, RARELY),
    "solve_with_many_tricks": partial(solve_with_tricks, OFTEN),
    **{
        f"judge_{kind}_impressed_by_{trick}": partial(judge_impressed, write, trick)
        for trick in TRICKS
        for kind, write in TEXTS.items()
    },
    **{f"judge_{kind}_briefly": partial(judge_briefly, write) for kind, write in TEXTS.items()},
}


def draw_examples(lessons: tuple[SftTask, ...], count: int, seed: int) -> Iterator[SftExample]:
    """`count` examples in a fixed random order of kinds, each on another problem of the training split."""
    rng = random.Random(f"lessons {seed}")
    kinds, weights = [lesson.kind for lesson in lessons], [lesson.weight for lesson in lessons]
    for problem in make_problems("train", count, seed):
        yield SFT_TASKS[rng.choices(kinds, weights)[0]](problem, rng)


def tokenizer_corpus() -> Iterator[str]:
    """The training texts of the tokenizer of all tiny models."""
    words = ("user", "assistant", "system", " malformed", *(f" {number}" for number in range(LARGEST_WORD_NUMBER + 1)))
    yield from words * 200  # often enough to become one token each
    # Cut-off and scrambled texts would spend the vocabulary on parts of words.
    lessons = tuple(SftTask(kind=kind, weight=1.0) for kind in TOKENIZED if "malformed" not in kind)
    for example in draw_examples(lessons, CORPUS_SIZE, seed=0):
        yield example.prompt
        yield example.response
