"""Texts that are no solutions, which a judge must not pass. Pure: sampled with a random.Random."""

from __future__ import annotations

import random
from collections.abc import Callable

from grmpipe.tiny.problems import Problem, Solution, judgement, parse_solution
from grmpipe.tiny.solutions import corrupted_solution


def malformed_text(problem: Problem, rng: random.Random) -> str:
    """Any text but a solution: cut off, empty, repeated, without steps, followed by junk or a forged verdict."""
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
    """A solution followed by text in the judge's format."""
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
