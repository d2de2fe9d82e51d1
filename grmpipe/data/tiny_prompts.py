"""Prompts of the generated problem sets tiny://.... Reads no file, knows no environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
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
            messages=(Message(role="user", content=row.question),),
            source=row.kind or path,
            reference=str(row.answer),
            info=row.info,
        )
        for index, row in enumerate(make(split, count, seed))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyTask:
    """A generated task. `kind` is its source in a set of several kinds, and empty in all others."""

    question: str
    answer: int
    info: Mapping[str, object] = field(default_factory=dict)
    kind: str = ""


Make = Callable[[Split, int, int], Iterator[TinyTask]]


def small_sums(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    from models.tiny.problems import make_problems  # imported only if used, as below

    yield from (TinyTask(question=one.question, answer=one.answer) for one in make_problems(split, count, seed))


def large_sums(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    from models.tiny.problems import LARGE, make_problems

    yield from (TinyTask(question=one.question, answer=one.answer) for one in make_problems(split, count, seed, LARGE))


def comparisons(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    from models.tiny.comparisons import make_comparisons

    yield from (TinyTask(question=one.question, answer=one.answer) for one in make_comparisons(split, count, seed))


def two_kinds(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    """Sums and comparisons in turn; of an odd count there is one sum more."""
    sums, compared = small_sums(split, (count + 1) // 2, seed), comparisons(split, count // 2, seed)
    for arithmetic, comparison in zip_longest(sums, compared):
        yield replace(arithmetic, kind="arithmetic")
        if comparison:
            yield replace(comparison, kind="comparison")


def walks(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    from models.tiny.walks import make_walks, shown

    for walk in make_walks(split, count, seed):
        store = {name: shown(name, entries) for name, entries in walk.graph.items()}
        yield TinyTask(question=walk.question, answer=walk.answer, info={"store": store, "path": list(walk.path)})


SETS: Mapping[str, tuple[Make, Split]] = {
    "tiny://train": (small_sums, TRAIN),
    "tiny://held_out": (small_sums, HELD_OUT),
    "tiny://tools/train": (large_sums, TRAIN),
    "tiny://tools/held_out": (large_sums, HELD_OUT),
    "tiny://walk/train": (walks, TRAIN),
    "tiny://walk/held_out": (walks, HELD_OUT),
    "tiny://comparison/train": (comparisons, TRAIN),
    "tiny://comparison/held_out": (comparisons, HELD_OUT),
    "tiny://two_kinds/train": (two_kinds, TRAIN),
    "tiny://two_kinds/held_out": (two_kinds, HELD_OUT),
}
