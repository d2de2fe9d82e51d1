"""Answers that no server should give: valid ones, changed at random places. The same seed gives the same answers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

WRONG: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf,
    "", " ", "stop", "0", "７", "\ud800", "\udfff\ud800", "\x1b[2J\x07", "\u202e", "\0", "x" * 3000,
    [], [None], [[]], [[[[[]]]]], ["text"], [0.5, "x"], [{}], {}, {"": None}, {"type": ["text"], "text": "x"},
    {"text": {"text": "x"}}, {"0": {"0": 0}},
)  # fmt: skip


def hostile_answers(valid: list[Any], count: int, seed: int) -> Iterator[bytes]:
    """Bodies: most are JSON with up to three changes, some are cut or have a wrong byte, some are nested very deep."""
    chance = random.Random(seed)
    texts = [json.dumps(answer) for answer in valid]
    for number in range(count):
        answer = json.loads(texts[number % len(texts)])
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            answer = _change(answer, chance)
        body = bytearray(json.dumps(answer).encode())
        kind = chance.random()
        if kind < 0.03 and body:
            del body[chance.randrange(len(body)) :]
        elif kind < 0.06 and body:
            body[chance.randrange(len(body))] = chance.randrange(256)
        elif kind < 0.061:
            body = bytearray(b'{"choices":' * 3000 + b"[" * 3000)
        yield bytes(body)


def _change(answer: Any, chance: random.Random) -> Any:
    """The answer with another value at a random place, which may be its root: a wrong one, none, its own in a list, or
    twice.
    """
    places = list(_places(answer))
    if not places or chance.random() < 0.02:
        return deepcopy(chance.choice(WRONG))
    parent, name = chance.choice(places)
    kind = chance.random()
    if kind < 0.15:
        del parent[name]
    elif kind < 0.3:
        parent[name] = [parent[name]] * chance.choice((1, 1, 2, 3))
    elif kind < 0.35 and isinstance(parent, list):
        parent.insert(0, deepcopy(chance.choice(WRONG)))
    elif kind < 0.4 and isinstance(parent, dict):
        parent[str(deepcopy(chance.choice(WRONG)))] = parent[name]
    else:
        parent[name] = deepcopy(chance.choice(WRONG))
    return answer


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All places within a value: (its parent, its name or index there)."""
    names = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for name in names:
        yield value, name
        yield from _places(value[name])
