"""Bounds of numbers, which stand with the defaults of a section's keys. None is within all bounds: no number is set."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import TypeVar

T = TypeVar("T")
BOUND, TEXT = "bound", "text"


class Bounded:
    """A dataclass whose numbers are within their bounds. Raises ValueError that begins with the key."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            if BOUND in spec.metadata and value is not None and not spec.metadata[BOUND](value):
                raise ValueError(f"{spec.name}: must be {spec.metadata[TEXT]}, got {value}")


def check_known(key: str, value: str, known: Collection[str]) -> None:
    """Raises ValueError for a value that is none of a key's."""
    if value not in known:
        raise ValueError(f"{key}: unknown value {value!r}; known: {', '.join(known)}")


def at_least(least: float, default: T) -> T:
    text = "0 or more" if least == 0 else f"at least {least:g}"
    return dataclasses.field(default=default, metadata={BOUND: lambda value: least <= value < math.inf, TEXT: text})


def above(least: float, default: T) -> T:
    return dataclasses.field(default=default, metadata={BOUND: lambda value: value > least, TEXT: f"above {least:g}"})


def positive(default: T) -> T:
    finite = {BOUND: lambda value: 0 < value < math.inf, TEXT: "a number above 0"}
    return dataclasses.field(default=default, metadata=finite)


def between_0_and_1(default: T) -> T:
    between = {BOUND: lambda value: 0 <= value <= 1, TEXT: "between 0 and 1"}
    return dataclasses.field(default=default, metadata=between)


def above_0_to_1(default: T) -> T:
    within = {BOUND: lambda value: 0 < value <= 1, TEXT: "above 0 and at most 1"}
    return dataclasses.field(default=default, metadata=within)
