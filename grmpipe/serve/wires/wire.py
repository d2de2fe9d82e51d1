"""What the wires have in common: what one asks, what it is answered, and how long its client waits. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grmpipe.data.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A response that a trainer wants judged.

    row:        a row of task=score without its responses.
    response:   a text, or messages.
    group_id:   of the siblings; empty: those to an equal row.
    group_size: how many they are, where the row says it; None: the URL may.
    """

    row: Row
    response: str | list[object]
    group_id: str = ""
    group_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a trainer gets for a response. imputed: why the judge has no verdict on it, so that it has the mean of its
    siblings; empty: the judge's own.
    """

    value: float
    imputed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How a trainer asks a reward model at a URL.

    path:      of the URL; {judge} is the name of a judge or composition, or `reward`.
    fields:    of its request, in words for an error.
    read:      a request -> the responses in it. Raises ValueError that begins with the field.
    write:     the request and the rewards, in the order of `read` -> the answer, as JSON.
    timeout_s: how long the client waits for an answer; None: as long as it takes.
    tries:     how often it asks until it gives up.
    gap_s:     longest time between two of them.
    """

    path: str
    fields: str
    read: Callable[[Row], list[Asked]]
    write: Callable[[Row, Sequence[Reward]], object]
    timeout_s: float | None
    tries: int = 1
    gap_s: float = 0.0
