"""Sets of generated problems by name, each with a training and a held-out split. Pure: no files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.tiny.comparisons import make_comparisons
from models.tiny.problems import Split, make_problems

HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question and its answer. `kind` says which sort it is in a set that has several, else it is empty."""

    question: str
    answer: int
    kind: str


def arithmetic(split: Split, count: int, seed: int) -> tuple[Task, ...]:
    return tuple(
        Task(question=problem.question, answer=problem.answer, kind="arithmetic")
        for problem in make_problems(split, count, seed)
    )


def comparison(split: Split, count: int, seed: int) -> tuple[Task, ...]:
    return tuple(
        Task(question=made.question, answer=made.answer, kind="comparison")
        for made in make_comparisons(split, count, seed)
    )


def two_kinds(split: Split, count: int, seed: int) -> tuple[Task, ...]:
    """Both in turn."""
    pairs = zip(arithmetic(split, (count + 1) // 2, seed), comparison(split, (count + 1) // 2, seed), strict=True)
    return tuple(task for pair in pairs for task in pair)[:count]


MAKERS: dict[str, Callable[[Split, int, int], tuple[Task, ...]]] = {
    "arithmetic": arithmetic,
    "comparison": comparison,
    "two_kinds": two_kinds,
}
# Of each name its problem set and split; `train` and `held_out` are arithmetic too.
PROBLEM_SETS: dict[str, tuple[str, Split]] = {
    "train": ("arithmetic", "train"),
    HELD_OUT: ("arithmetic", "held_out"),
    **{name: (name, "train") for name in MAKERS},
    **{f"{name}_{HELD_OUT}": (name, "held_out") for name in MAKERS},
}


def make_tasks(name: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` tasks of a row of PROBLEM_SETS."""
    maker, split = PROBLEM_SETS[name]
    return MAKERS[maker](split, count, seed)
