"""Walks through a key-value store: follow the women, or the men, to a number. Pure: no model, no env."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from grmpipe.tiny.problems import PEOPLE, Split, different

MIN_HOPS, MAX_HOPS = 2, 6
MAX_ENTRIES = 3
MAX_VISITS = 10  # in an episode
NUMBERS = (10, 59)  # one token each

Entry = str | int  # a name, or the number at the end
Graph = Mapping[str, tuple[Entry, ...]]  # the entries of each name, in the order shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A question that begins at the first name of `path`; the last one has the answer.

    pronoun: for the names to follow: "She" or "He".
    """

    question: str
    pronoun: str
    path: tuple[str, ...]
    answer: int
    graph: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Haste:
    """The probability of each mistake, per name."""

    first_entry: float = 0.45  # takes the first entry, whoever it is
    guess: float = 0.01  # answers with any number


def make_walks(split: Split, count: int, seed: int) -> tuple[Walk, ...]:
    """`count` different walks of one split. No question is in both splits, whatever the seeds."""
    rng = random.Random(f"walks {seed}")
    return different(lambda: draw_walk(rng), split, count, key=lambda walk: f"{walk.question} {walk.graph}")


def draw_walk(rng: random.Random) -> Walk:
    """The path, and beside it names that other entries lead to: from there no way leads back to the path."""
    pronoun, answer = rng.choice(("She", "He")), rng.randint(*NUMBERS)
    followed, others = (
        shuffle_names(rng, [name for name in PEOPLE if (PEOPLE[name] == pronoun) == same]) for same in (True, False)
    )
    num_hops = rng.randint(MIN_HOPS, MAX_HOPS)
    start = others.pop()
    path, astray = [start, *followed[:num_hops]], followed[num_hops:]
    after: list[Entry] = [*path[1:], answer]
    graph = {name: draw_entries(rng, entry, others) for name, entry in zip(path, after, strict=True)}
    for place, name in enumerate(others):
        graph[name] = draw_entries(rng, draw_entry(rng, astray), others[place + 1 :])
    for place, name in enumerate(astray):
        graph[name] = draw_entries(rng, draw_entry(rng, astray[place + 1 :]), [])
    question = f"{format_entries(start, graph[start])} {pronoun}?"
    return Walk(question=question, pronoun=pronoun, path=tuple(path), answer=answer, graph=graph)


def shuffle_names(rng: random.Random, names: list[str]) -> list[str]:
    return rng.sample(names, len(names))


def draw_entries(rng: random.Random, entry: Entry, others: list[str]) -> tuple[Entry, ...]:
    """The entry to take among names of the other pronoun, in random order."""
    entries = [entry, *rng.sample(others, min(len(others), rng.randrange(MAX_ENTRIES)))]
    rng.shuffle(entries)
    return tuple(entries)


def draw_entry(rng: random.Random, names: list[str]) -> Entry:
    return rng.choice(names) if names and rng.random() < 0.7 else rng.randint(*NUMBERS)


def format_entries(name: str, entries: tuple[Entry, ...]) -> str:
    """A name's entries as text: "Ida: Tom; Zoe." or "Zoe: 17; Tom."."""
    return f"{name}: {'; '.join(map(str, entries))}."


def take_entry(entry: Entry) -> str:
    """The turn that takes an entry: a name is visited, a number is the answer."""
    return f" {entry}"


def name_visited(turn: str) -> str | None:
    """The name that a turn takes; None if it takes none."""
    return turn[1:] if re.fullmatch(rf" ({'|'.join(PEOPLE)})", turn) else None


def final(walk: Walk) -> str:
    return take_entry(walk.answer)


def right_turns(walk: Walk) -> tuple[str, ...]:
    """What a careful policy writes, turn by turn."""
    return (*map(take_entry, walk.path[1:]), take_entry(walk.answer))


def hasty_turns(walk: Walk, haste: Haste, rng: random.Random) -> tuple[str, ...]:
    """Turns with mistakes. A wrong name is not on the path, and the walk goes on from there."""
    at = walk.path[0]
    turns: list[str] = []
    while True:
        entry = choice(walk, at, haste, rng)
        turns.append(take_entry(entry))
        if isinstance(entry, int):
            return tuple(turns)
        at = entry


def choice(walk: Walk, at: str, haste: Haste, rng: random.Random) -> Entry:
    if rng.random() < haste.guess:
        return rng.randint(*NUMBERS)
    entries = walk.graph[at]
    return entries[0] if rng.random() < haste.first_entry else entry_to_take(walk, at)


def entry_to_take(walk: Walk, at: str) -> Entry:
    """The one name with the asked pronoun; the number where there is none."""
    return next(entry for entry in walk.graph[at] if isinstance(entry, int) or PEOPLE[entry] == walk.pronoun)
