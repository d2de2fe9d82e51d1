"""Walks through a key-value store: follow one thing from name to name to its number. Pure: no model, no env."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from models.tiny.problems import PEOPLE, THINGS, Split, split_of

MIN_HOPS, MAX_HOPS = 2, 6
MAX_ENTRIES = 3
MAX_VISITS = 10  # of an episode
NUMBERS = (10, 59)  # one token each

Entry = str | int  # the name that has it, or how many
Graph = Mapping[str, Mapping[str, Entry]]  # name -> thing -> entry, in the order shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A question about `thing` from the first name of `path`; its last name has the answer."""

    question: str
    thing: str
    path: tuple[str, ...]
    answer: int
    graph: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Haste:
    """The probability of each mistake, per node."""

    first_entry: float = 0.45  # takes the first entry, whatever its thing
    guess: float = 0.01  # answers with any number


def make_walks(split: Split, count: int, seed: int) -> tuple[Walk, ...]:
    """`count` different walks of one split. No question is in both splits, whatever the seeds."""
    chosen: dict[str, Walk] = {}
    for walk in draw_walks(seed):
        if len(chosen) == count:
            break
        if split_of(walk.question) == split:
            chosen.setdefault(f"{walk.question} {walk.graph}", walk)
    return tuple(chosen.values())


def draw_walks(seed: int) -> Iterator[Walk]:
    """An endless stream, with repeats."""
    rng = random.Random(f"walks {seed}")
    while True:
        yield draw_walk(rng)


def draw_walk(rng: random.Random) -> Walk:
    """The path, and beside it names that other entries lead to: from there no way leads back to the path."""
    names = list(PEOPLE)
    rng.shuffle(names)
    num_hops = rng.randint(MIN_HOPS, MAX_HOPS)
    path, others = names[: num_hops + 1], names[num_hops + 1 :]
    thing, answer = rng.choice(THINGS), rng.randint(*NUMBERS)
    nexts: list[str | int] = [*path[1:], answer]
    graph = {name: draw_entries(rng, thing, after, others) for name, after in zip(path, nexts, strict=True)}
    for place, name in enumerate(others):
        graph[name] = draw_entries(rng, thing, draw_entry(rng, others[place + 1 :]), others[place + 1 :])
    question = f"{shown(path[0], graph[path[0]])} How many {thing} does {path[0]} have?"
    return Walk(question=question, thing=thing, path=tuple(path), answer=answer, graph=graph)


def draw_entries(rng: random.Random, thing: str, entry: Entry, others: list[str]) -> dict[str, Entry]:
    """The entry of the asked thing among up to two of other things, in random order."""
    more = rng.sample([other for other in THINGS if other != thing], rng.randrange(MAX_ENTRIES))
    entries = [(thing, entry), *((other, draw_entry(rng, others)) for other in more)]
    rng.shuffle(entries)
    return dict(entries)


def draw_entry(rng: random.Random, others: list[str]) -> Entry:
    return rng.choice(others) if others and rng.random() < 0.7 else rng.randint(*NUMBERS)


def shown(name: str, entries: Mapping[str, Entry]) -> str:
    """A name's entries as text: "Ida has coins from Tom; 17 books."."""
    return f"{name} has {'; '.join(shown_entry(thing, entry) for thing, entry in entries.items())}."


def shown_entry(thing: str, entry: Entry) -> str:
    return f"{entry} {thing}" if isinstance(entry, int) else f"{thing} from {entry}"


def visit(name: str) -> str:
    return f" get {name}"


VISIT = re.compile(rf" get ({'|'.join(PEOPLE)})")


def name_visited(turn: str) -> str | None:
    """The name that a turn asks for; None if it asks for none."""
    match = VISIT.fullmatch(turn)
    return match[1] if match else None


def final(walk: Walk) -> str:
    return f"Answer: {walk.answer}"


def right_turns(walk: Walk) -> tuple[str, ...]:
    """What a careful policy writes, turn by turn."""
    return (*(visit(name) for name in walk.path[1:]), final(walk))


def hasty_turns(walk: Walk, haste: Haste, rng: random.Random) -> tuple[str, ...]:
    """Turns with mistakes. A wrong name is not on the path, and the walk goes on from there."""
    at = walk.path[0]
    turns: list[str] = []
    while True:
        entry = entry_taken(walk.graph[at], walk.thing, haste, rng)
        if isinstance(entry, int):
            return (*turns, f"Answer: {entry}")
        turns.append(visit(entry))
        at = entry


def entry_taken(entries: Mapping[str, Entry], thing: str, haste: Haste, rng: random.Random) -> Entry:
    if rng.random() < haste.guess:
        return rng.randint(*NUMBERS)
    first = next(iter(entries.values()))
    return first if rng.random() < haste.first_entry else entries[thing]
