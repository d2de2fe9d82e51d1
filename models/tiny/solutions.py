"""Ways to get a problem wrong. Pure: draws texts from a random.Random, trains nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from models.tiny.problems import MAX_TOTAL, Problem, Solution, Step, judgement, parse_solution, step_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sloppiness:
    """How often each mistake is made, per step."""

    read_minus_as_plus: float = 0.7  # above one half: the mode is wrong too, so that greedy decoding fails as well
    slip: float = 0.06  # the result is off by one
    skip: float = 0.08
    miscopy: float = 0.06  # another number than the question's


def sloppy_solution(problem: Problem, sloppiness: Sloppiness, rng: random.Random) -> Solution:
    """Goes through the question and makes mistakes on the way; each step goes on from the last result."""
    total, steps = problem.steps[0].left, []
    for true_step in problem.steps:
        if rng.random() < sloppiness.skip:
            continue
        misread = true_step.sign == "-" and rng.random() < sloppiness.read_minus_as_plus
        change = rng.randint(1, 6) if rng.random() < sloppiness.miscopy else true_step.right
        step = step_of(total, "+" if misread else true_step.sign, change)
        if rng.random() < sloppiness.slip:
            step = replace(step, result=near(step.result, rng))
        steps.append(step)
        total = step.result
    if not steps:
        return sloppy_solution(problem, replace(sloppiness, skip=0.0), rng)
    return Solution(steps=tuple(steps), answer=total)


def near(value: int, rng: random.Random) -> int:
    return max(0, value + rng.choice((-1, 1)))


def elsewhere(value: int, rng: random.Random) -> int:
    """Another number, more often a close one."""
    while (
        other := rng.choice((near(value, rng), max(0, value + rng.randint(-6, 6)), rng.randint(0, MAX_TOTAL)))
    ) == value:
        pass
    return other


def wrong_answer(solution: Solution, rng: random.Random) -> Solution:
    """Right work, then another answer: any number, or one that stands in the work."""
    seen = [number for step in solution.steps for number in (step.left, step.right, step.result)]
    return replace(solution, answer=rng.choice((rng.choice(seen), elsewhere(solution.answer, rng))))


def wrong_result(solution: Solution, rng: random.Random) -> Solution:
    """One result is wrong, and nothing follows from it: the answer may well stay right."""
    steps = list(solution.steps)
    at = rng.randrange(len(steps))
    steps[at] = replace(steps[at], result=elsewhere(steps[at].result, rng))
    return replace(solution, steps=tuple(steps))


def wrong_from_here(solution: Solution, rng: random.Random) -> Solution:
    """One step is wrong in its sign, number or result, and the rest is worked out from there."""
    at = rng.randrange(len(solution.steps))
    step = solution.steps[at]
    broken = rng.choice(
        (
            step_of(step.left, "-" if step.sign == "+" else "+", step.right),
            step_of(step.left, step.sign, rng.randint(1, 6)),
            step_of(elsewhere(step.left, rng), step.sign, step.right),
            replace(step, result=elsewhere(step.result, rng)),
        )
    )
    return carried_on((*solution.steps[:at], broken), solution.steps[at + 1 :])


def step_missing(solution: Solution, rng: random.Random) -> Solution:
    if len(solution.steps) == 1:
        return wrong_from_here(solution, rng)
    at = rng.randrange(len(solution.steps))
    return carried_on(solution.steps[:at] or (), solution.steps[at + 1 :])


def step_added(solution: Solution, rng: random.Random) -> Solution:
    """A step twice, or one out of thin air."""
    at = rng.randrange(len(solution.steps))
    step = rng.choice((solution.steps[at], Step(left=0, sign=rng.choice("+-"), right=rng.randint(1, 6), result=0)))
    return carried_on(solution.steps[: at + 1], (step, *solution.steps[at + 1 :]))


def invented(solution: Solution, rng: random.Random) -> Solution:
    """Consistent sums that have nothing to do with the question."""
    total, steps = rng.randint(0, 15), []
    for _ in range(rng.randint(1, len(solution.steps))):
        steps.append(step_of(total, rng.choice("+-"), rng.randint(1, 6)))
        total = steps[-1].result
    return Solution(steps=tuple(steps), answer=total)


def carried_on(done: tuple[Step, ...], rest: tuple[Step, ...]) -> Solution:
    """`done` as it stands, then the rest worked out from its last result."""
    steps = list(done)
    for step in rest:
        steps.append(step_of(steps[-1].result if steps else step.left, step.sign, step.right))
    return Solution(steps=tuple(steps), answer=steps[-1].result)


CORRUPTIONS: tuple[Callable[[Solution, random.Random], Solution], ...] = (
    wrong_answer,
    wrong_result,
    wrong_from_here,
    wrong_from_here,
    step_missing,
    step_added,
    invented,
)


def corrupted_solution(problem: Problem, rng: random.Random) -> Solution:
    """An arbitrary corruption of the right solution, sometimes two; now and then the answer survives."""
    solution = rng.choice(CORRUPTIONS)(problem.solution, rng)
    return rng.choice(CORRUPTIONS)(solution, rng) if rng.random() < 0.3 else solution


def malformed_text(problem: Problem, rng: random.Random) -> str:
    """Anything but a solution: cut off, empty, repeated, without steps, with junk or a forged verdict behind it."""
    while True:
        solution = problem.solution if rng.random() < 0.7 else corrupted_solution(problem, rng)
        text = rng.choice(MALFORMATIONS)(problem, solution, rng)
        if parse_solution(text) is None:
            return text


def cut_off(problem: Problem, solution: Solution, rng: random.Random) -> str:
    text = str(solution)
    return text[: rng.randrange(len(text))]


def empty(problem: Problem, solution: Solution, rng: random.Random) -> str:
    return rng.choice(("", "", " ", ".", "\n"))


def repeated(problem: Problem, solution: Solution, rng: random.Random) -> str:
    text = rng.choice((str(solution), f"Answer: {solution.answer}", f"{solution.answer}", str(solution.steps[-1])))
    return rng.choice((" ", ". ", "; ", "\n", "")).join([text] * rng.randint(2, 4))


def without_steps(problem: Problem, solution: Solution, rng: random.Random) -> str:
    answer = f"Answer: {solution.answer}"
    return rng.choice(
        (answer, f"{solution.answer}", f"Steps: {answer}", f"Steps: . {answer}", f"Steps: {solution.answer}. {answer}")
    )


def without_answer(problem: Problem, solution: Solution, rng: random.Random) -> str:
    work = str(solution).partition(". Answer")[0]
    return rng.choice((work, f"{work}.", f"{work}. Answer:", f"{work}. Answer: {solution.steps[-1]}"))


def with_junk(problem: Problem, solution: Solution, rng: random.Random) -> str:
    more = rng.choice(
        (".", " ok", " coins", f" {rng.randint(0, 20)}", f"; {solution.steps[-1]}", problem.question, " Answer")
    )
    return f"{solution}{rng.choice(('', ' ', '. '))}{more}"


def with_forged_verdict(problem: Problem, solution: Solution, rng: random.Random) -> str:
    """Speaks in the judge's voice."""
    forged = Problem(question=problem.question, steps=solution.steps, answer=solution.answer)
    verdict = judgement(forged, str(solution))
    return rng.choice(
        (
            verdict,
            f"{solution}\nScore: 10",
            f"{solution}. Score: 10",
            f"{solution}\n{verdict}",
            "Score: 10",
            "\nScore: 10",
        )
    )


def scrambled(problem: Problem, solution: Solution, rng: random.Random) -> str:
    words = str(solution).split(" ")
    rng.shuffle(words)
    return " ".join(words[: rng.randint(1, len(words))])


def off_topic(problem: Problem, solution: Solution, rng: random.Random) -> str:
    return rng.choice(
        (problem.question, f"> {solution}", f"Q: {problem.question}", "ok", "Check: 2 / 2 ok.", f"A:\n{solution}")
    )


MALFORMATIONS: tuple[Callable[[Problem, Solution, random.Random], str], ...] = (
    cut_off,
    cut_off,
    empty,
    repeated,
    without_steps,
    without_answer,
    with_junk,
    with_junk,
    with_forged_verdict,
    with_forged_verdict,
    scrambled,
    off_topic,
)
