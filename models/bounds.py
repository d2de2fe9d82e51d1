"""Bounds of numbers and choices of texts, which stand with the defaults of a section's keys. None is within all of
them: nothing is set.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

T = TypeVar("T")
CHECK = "check"
REQUIRED = cast(Any, dataclasses.MISSING)  # the default of a key that has none


class Bounded:
    """A dataclass whose values are within their bounds. Raises ValueError that begins with the key."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            if CHECK in spec.metadata and value is not None and (wrong := spec.metadata[CHECK](value)):
                raise ValueError(f"{spec.name}: {wrong}")


def one_of(known: Collection[str], default: T, what: str = "value", also: str = "") -> T:
    """also: what else the key takes, in words."""

    def check(value: str) -> str:
        return "" if value in known else f"unknown {what} {value!r}; known: {', '.join(filter(None, (*known, also)))}"

    return dataclasses.field(default=default, metadata={CHECK: check})


def not_empty(default: T, way_out: str) -> T:
    """way_out: what to type instead of an empty text."""
    check = {CHECK: lambda value: "" if value else f"is empty; {way_out}"}
    return dataclasses.field(default=default, metadata=check)


def at_least(least: float, default: T, text: str = "") -> T:
    """text: the bound in words, if they say more than the number does. So for all bounds below."""
    usual = "0 or more" if least == 0 else f"at least {least:g}"
    return _within(lambda value: least <= value < math.inf, default, text or usual)


def above(least: float, default: T = REQUIRED, text: str = "") -> T:
    return _within(lambda value: value > least, default, text or f"above {least:g}")


def positive(default: T, text: str = "a number above 0") -> T:
    return _within(lambda value: 0 < value < math.inf, default, text)


def finite(default: T) -> T:
    return _within(math.isfinite, default, "a number")


def between_0_and_1(default: T) -> T:
    return _within(lambda value: 0 <= value <= 1, default, "between 0 and 1")


def between(low: float, high: float, default: T, text: str) -> T:
    """Both ends are outside."""
    return _within(lambda value: low < value < high, default, text)


def from_0_to_1(default: T) -> T:
    return _within(lambda value: 0 <= value <= 1, default, "from 0 to 1")


def above_0_to_1(default: T) -> T:
    return _within(lambda value: 0 < value <= 1, default, "above 0 and at most 1")


def _within(is_within: Callable[[float], bool], default: T, text: str) -> T:
    check = {CHECK: lambda value: "" if is_within(value) else f"must be {text}, got {value}"}
    return dataclasses.field(default=default, metadata=check)
