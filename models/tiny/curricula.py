"""The examples of a curriculum: which problems each kind of example is made of. Pure: text only, trains nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from models.tiny.comparison_examples import COMPARISON_TASKS
from models.tiny.dialogues import CALCULATOR_TASKS, WALK_TASKS, Dialogue
from models.tiny.problems import LARGE, make_problems
from models.tiny.sft_examples import SFT_TASKS, SftExample, SftTask, draw_examples
from models.tiny.walks import make_walks

P = TypeVar("P")  # a problem
E = TypeVar("E")  # an example


def draw_curriculum(lessons: tuple[SftTask, ...], count: int, seed: int) -> Iterator[SftExample | Dialogue]:
    """`count` examples in a fixed random order of kinds, each on another problem of the training split.

    All kinds of a curriculum are made of the same problems: small ones, large ones or walks. Comparisons are drawn on
    their own and may be mixed with small ones.
    """
    kinds = {lesson.kind for lesson in lessons}
    if kinds <= set(SFT_TASKS):
        yield from draw_examples(lessons, count, seed)
    elif kinds <= {*SFT_TASKS, *COMPARISON_TASKS}:
        yield from drawn({**SFT_TASKS, **COMPARISON_TASKS}, make_problems("train", count, seed), lessons, seed)
    elif kinds <= set(CALCULATOR_TASKS):
        yield from drawn(CALCULATOR_TASKS, make_problems("train", count, seed, LARGE), lessons, seed)
    else:
        yield from drawn(WALK_TASKS, make_walks("train", count, seed), lessons, seed)


def drawn(
    tasks: Mapping[str, Callable[[P, random.Random], E]], problems: Sequence[P], lessons: tuple[SftTask, ...], seed: int
) -> Iterator[E]:
    rng = random.Random(f"dialogues {seed}")
    kinds, weights = [lesson.kind for lesson in lessons], [lesson.weight for lesson in lessons]
    for problem in problems:
        yield tasks[rng.choices(kinds, weights)[0]](problem, rng)
