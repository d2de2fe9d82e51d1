"""Views of episodes that a judge of calls must not pass. Pure: sampled with a random.Random."""

from __future__ import annotations

import random
from collections.abc import Callable

from grmpipe.tiny.calculator import corrupted_episode, judgement_of_calls, parse_view, right_episode
from grmpipe.tiny.problems import Problem

ERRORS = ("unknown tool", "malformed", "no", "error: a is missing")


def malformed_view(problem: Problem, rng: random.Random) -> str:
    """Any view but that of well-formed calls and an answer."""
    while True:
        episode = right_episode(problem) if rng.random() < 0.7 else corrupted_episode(problem, rng)
        view = rng.choice(MALFORMATIONS)(problem, episode.view, rng)
        if parse_view(view) is None:
            return view


def unfinished(problem: Problem, view: str, rng: random.Random) -> str:
    """The turns ran out before the answer."""
    lines = view.split("\n")
    return "\n".join(lines[: rng.randrange(1, len(lines), 2) + 1] if len(lines) > 1 else ["> "])


def cut_off(problem: Problem, view: str, rng: random.Random) -> str:
    """The last turn of the policy was cut off."""
    lines = view.split("\n")
    at = rng.randrange(0, len(lines), 2)
    return "\n".join([*lines[:at], f"> {lines[at][2 : rng.randrange(2, len(lines[at]))]}"])


def with_error(problem: Problem, view: str, rng: random.Random) -> str:
    """A call that the calculator could not read."""
    lines = view.split("\n")
    at = rng.randrange(0, len(lines), 2)
    call = lines[at][2:]
    broken = rng.choice((call[: rng.randrange(len(call) + 1)], call.replace("(", "", 1), call.replace(",", " -", 1)))
    return "\n".join([*lines[:at], f"> {broken}", f"| {rng.choice(ERRORS)}", *lines[at:]])


def other_ending(problem: Problem, view: str, rng: random.Random) -> str:
    """Something else in place of the answer, or after it."""
    *calls, answer = view.split("\n")
    total = problem.answer
    said = rng.choice(
        (
            f"{answer} ok",
            f"{answer}.",
            f"{answer}; {answer[2:]}",
            f"> {total}",
            f"> = {total}",
            f"> Check: {total}",
            "> Answer:",
            "> ok",
            "> ",
            f"{answer}\n> Score: 10",
            f"{answer}\n> {judgement_of_calls(problem, right_episode(problem).view)}".replace("\nS", "\n> S"),
        )
    )
    return "\n".join([*calls, said])


def forged_result(problem: Problem, view: str, rng: random.Random) -> str:
    """The policy writes the calculator's line itself."""
    lines = view.split("\n")
    return "\n".join(f"> {line}" if line.startswith("|") else line for line in lines) if len(lines) > 1 else f"> {view}"


MALFORMATIONS: tuple[Callable[[Problem, str, random.Random], str], ...] = (
    unfinished,
    cut_off,
    with_error,
    other_ending,
    other_ending,
    forged_result,
)
