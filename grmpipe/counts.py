"""Counts that add up, step by step and over a resume. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, ClassVar, Self

import msgspec


class Counts:
    """A base of dataclasses whose fields add up: numbers, further counts, and either of them by name. A list holds
    single values of one step and process: it is neither added nor saved.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __add__(self, other: Self) -> Self:
        names = [spec.name for spec in fields(self)]
        return type(self)(**{name: _sum(getattr(self, name), getattr(other, name)) for name in names})

    def to_dict(self) -> dict[str, object]:
        """The counts for a checkpoint."""
        values = ((spec.name, getattr(self, spec.name)) for spec in fields(self))
        return {name: _plain(value) for name, value in values if not isinstance(value, list)}

    @classmethod
    def restore(cls, saved: Mapping[str, object]) -> Self:
        """Counts from what `to_dict` wrote. What it lacks is 0."""
        return msgspec.convert(saved, cls, dec_hook=lambda _, by_name: Counter(by_name))


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, list):
        return one
    if not isinstance(one, Mapping):
        return one + other
    zeros = {name: type(some)() for name, some in {**one, **other}.items()}
    by_name = {name: _sum(one.get(name, zero), other.get(name, zero)) for name, zero in zeros.items()}
    return Counter(by_name) if isinstance(one, Counter) else by_name


def _plain(value: object) -> object:
    if isinstance(value, Counts):
        return value.to_dict()
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, Mapping) else value
