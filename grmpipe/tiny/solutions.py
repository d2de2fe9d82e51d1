"""Wrong solutions of a problem, all well-formed. Pure: sampled with a random.Random; no text, no judge."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from grmpipe.tiny.problems import MAX_TOTAL, Problem, Solution, SolutionStep, make_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Sloppiness:
    """The probability of each mistake, per step."""

    read_minus_as_plus: float = 0.65  # above one half: the mode is wrong too, so greedy decoding also fails
    slip: float = 0.06  # the result is off by one
    skip: float = 0.08
    miscopy: float = 0.06  # another number than the question's
    twice: float = 0.04  # the same step twice


def sloppy_solution(problem: Problem, sloppiness: Sloppiness, rng: random.Random) -> Solution:
    """A solution with mistakes; each step continues from the last result."""
    total, steps = problem.steps[0].left, []
    for true_step in what_is_read(problem.steps, sloppiness.skip, sloppiness.twice, rng):
        misread = true_step.sign == "-" and rng.random() < sloppiness.read_minus_as_plus
        change = rng.randint(1, 6) if rng.random() < sloppiness.miscopy else true_step.right
        step = make_step(total, "+" if misread else true_step.sign, change)
        if rng.random() < sloppiness.slip:
            step = replace(step, result=near(step.result, rng))
        steps.append(step)
        total = step.result
    return Solution(steps=tuple(steps), answer=total)


def what_is_read(
    steps: tuple[SolutionStep, ...], skip: float, twice: float, rng: random.Random
) -> tuple[SolutionStep, ...]:
    """The steps as read: some are skipped and some read twice, with these probabilities, but never all skipped."""
    read: list[SolutionStep] = []
    for step in steps:
        luck = rng.random()
        read += [step] * (0 if luck < skip else 2 if luck > 1 - twice else 1)
    return tuple(read) or steps


def near(value: int, rng: random.Random) -> int:
    return max(0, value + rng.choice((-1, 1)))


def elsewhere(value: int, rng: random.Random) -> int:
    """Another number, more often a close one."""
    while True:
        other = rng.choice((near(value, rng), max(0, value + rng.randint(-6, 6)), rng.randint(0, MAX_TOTAL)))
        if other != value:
            return other


def wrong_answer(solution: Solution, rng: random.Random) -> Solution:
    """Right work, then a wrong answer: any number, or one from the work."""
    seen = [number for step in solution.steps for number in (step.left, step.right, step.result)]
    return replace(solution, answer=rng.choice((rng.choice(seen), elsewhere(solution.answer, rng))))


def wrong_result(solution: Solution, rng: random.Random) -> Solution:
    """One wrong result that the next steps don't use: the answer may still be right."""
    steps = list(solution.steps)
    at = rng.randrange(len(steps))
    steps[at] = replace(steps[at], result=elsewhere(steps[at].result, rng))
    return replace(solution, steps=tuple(steps))


def wrong_from_here(solution: Solution, rng: random.Random) -> Solution:
    """One step with a wrong sign, number or result; the rest is worked out from there."""
    at = rng.randrange(len(solution.steps))
    step = solution.steps[at]
    broken = rng.choice(
        (
            make_step(step.left, "-" if step.sign == "+" else "+", step.right),
            make_step(step.left, step.sign, rng.randint(1, 6)),
            make_step(elsewhere(step.left, rng), step.sign, step.right),
            replace(step, result=elsewhere(step.result, rng)),
        )
    )
    return carry_on((*solution.steps[:at], broken), solution.steps[at + 1 :])


def step_missing(solution: Solution, rng: random.Random) -> Solution:
    if len(solution.steps) == 1:
        return wrong_from_here(solution, rng)
    at = rng.randrange(len(solution.steps))
    return carry_on(solution.steps[:at], solution.steps[at + 1 :])


def step_added(solution: Solution, rng: random.Random) -> Solution:
    """A step twice, or an invented one."""
    at = rng.randrange(len(solution.steps))
    step = rng.choice(
        (solution.steps[at], SolutionStep(left=0, sign=rng.choice("+-"), right=rng.randint(1, 6), result=0))
    )
    return carry_on(solution.steps[: at + 1], (step, *solution.steps[at + 1 :]))


def pad_solution(problem: Problem, rng: random.Random) -> Solution:
    """More steps than in the question: the answer is right only by chance."""
    solution = problem.solution
    for _ in range(rng.randint(1, 3)):
        solution = step_added(solution, rng)
    return solution


def invent_solution(solution: Solution, rng: random.Random) -> Solution:
    """Consistent sums unrelated to the question."""
    total, steps = rng.randint(0, 15), []
    for _ in range(rng.randint(1, len(solution.steps))):
        steps.append(make_step(total, rng.choice("+-"), rng.randint(1, 6)))
        total = steps[-1].result
    return Solution(steps=tuple(steps), answer=total)


def carry_on(done: tuple[SolutionStep, ...], rest: tuple[SolutionStep, ...]) -> Solution:
    """`done` unchanged, then the rest worked out from its last result."""
    steps = list(done)
    for step in rest:
        steps.append(make_step(steps[-1].result if steps else step.left, step.sign, step.right))
    return Solution(steps=tuple(steps), answer=steps[-1].result)


CORRUPTIONS: tuple[Callable[[Solution, random.Random], Solution], ...] = (
    wrong_answer,
    wrong_result,
    wrong_from_here,
    wrong_from_here,
    step_missing,
    step_added,
    invent_solution,
)


def corrupt_solution(problem: Problem, rng: random.Random) -> Solution:
    """A random corruption of the right solution, sometimes two; sometimes the answer stays right."""
    solution = rng.choice(CORRUPTIONS)(problem.solution, rng)
    return rng.choice(CORRUPTIONS)(solution, rng) if rng.random() < 0.3 else solution
