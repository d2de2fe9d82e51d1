"""Faults in pipelines on a virtual clock: the worlds of tests/grmpipe/pipeline/test_pipeline_under_faults.py, more of
them, with more deaths.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "grmpipe" / "pipeline"))

import test_pipeline_under_faults as under_faults

DEATH, HUNG = "a death of an engine", "a request that never ends"


@contextmanager
def counted(faults: Counter[str]) -> Iterator[None]:
    """Context: faults that found a target are counted."""
    engine, die, length = under_faults.Spoken, under_faults.Spoken.die, under_faults.Spoken._length

    def count_death(self: Any, *args: Any) -> Any:
        faults[DEATH] += 1
        return die(self, *args)

    def count_hung(self: Any, *args: Any) -> int:
        tokens = length(self, *args)
        faults[HUNG] += tokens == under_faults.HUNG
        return tokens

    engine.die, engine._length = count_death, count_hung
    try:
        yield
    finally:
        engine.die, engine._length = die, length


def make_world(seed: str) -> under_faults.World:
    draw = random.Random(f"world {seed}")
    return under_faults.World(
        seed=draw.randrange(10**6),
        num_slots=draw.randint(1, 4),
        sharing=draw.choice(["none", "elastic", "time"]),
        sleeps=draw.random() < 0.5,
        max_staleness=draw.randint(0, 2),
        groups_per_batch=draw.randint(1, 3),
        group_size=draw.randint(2, 4),
        num_steps=draw.randint(2, 6),
        num_judgements=draw.randint(1, 3),
        deadline_s=draw.choice([40.0, 120.0]),
        typical_tokens=(draw.choice([10, 80]), draw.choice([10, 80])),
        hung_share=draw.choice([0.0, 0.05]),
        deaths=tuple((draw.uniform(0, 15), draw.randrange(8)) for _ in range(draw.randint(1, 8))),
    )


def play_worlds(seed: int, minutes: float) -> tuple[Counter[str], int, list[str]]:
    """Faults by kind, the number of worlds, and those in which a guarantee broke."""
    check = under_faults.test_faults_break_no_guarantee.hypothesis.inner_test  # type: ignore[attr-defined]
    faults, broken, number = Counter[str](), list[str](), 0
    until_s = time.monotonic() + 60 * minutes
    with counted(faults):
        while time.monotonic() < until_s:
            world = make_world(f"{seed}/{number}")
            number += 1
            try:
                check(world)
            except Exception as error:
                broken.append(f"{world}: {error!r}"[:600])
    return faults, number, broken
