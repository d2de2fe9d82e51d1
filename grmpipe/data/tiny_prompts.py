"""Prompts of the generated problem sets tiny://.... Reads no file, knows no environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from grmpipe.types import Prompt
from models.types import Message

TINY = "tiny://"
Split = Literal["train", "held_out"]
TRAIN: Split = "train"
HELD_OUT: Split = "held_out"


def tiny_prompts(path: str, count: int, seed: int = 0) -> tuple[Prompt, ...]:
    """`count` prompts of a problem set. Raises ValueError for an unknown one."""
    if path not in SETS:
        raise ValueError(f"{path}: unknown problem set; known: {', '.join(SETS)}")
    make, split = SETS[path]
    name = path.removeprefix(TINY).replace("/", "-")
    return tuple(
        Prompt(
            prompt_id=f"tiny-{name}-{index}",
            messages=(Message(role="user", content=question),),
            source=path,
            reference=answer,
            info=info,
        )
        for index, (question, answer, info) in enumerate(make(split, count, seed))
    )


Row = tuple[str, str, Mapping[str, object]]  # question, answer, info
Make = Callable[[Split, int, int], Iterator[Row]]


def small_sums(split: Split, count: int, seed: int) -> Iterator[Row]:
    from models.tiny.problems import make_problems  # imported only if used, as below

    yield from ((problem.question, str(problem.answer), {}) for problem in make_problems(split, count, seed))


def large_sums(split: Split, count: int, seed: int) -> Iterator[Row]:
    from models.tiny.problems import LARGE, make_problems

    yield from ((problem.question, str(problem.answer), {}) for problem in make_problems(split, count, seed, LARGE))


def walks(split: Split, count: int, seed: int) -> Iterator[Row]:
    from models.tiny.walks import make_walks, shown

    for walk in make_walks(split, count, seed):
        store = {name: shown(name, entries) for name, entries in walk.graph.items()}
        yield walk.question, str(walk.answer), {"store": store, "path": list(walk.path)}


SETS: Mapping[str, tuple[Make, Split]] = {
    "tiny://train": (small_sums, TRAIN),
    "tiny://held_out": (small_sums, HELD_OUT),
    "tiny://tools/train": (large_sums, TRAIN),
    "tiny://tools/held_out": (large_sums, HELD_OUT),
    "tiny://walk/train": (walks, TRAIN),
    "tiny://walk/held_out": (walks, HELD_OUT),
}
