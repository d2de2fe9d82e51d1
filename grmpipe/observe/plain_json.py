"""Values as JSON knows them: no NaN, no infinity, no dataclass. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass


def finite(value: float) -> float | None:
    """None for NaN and infinity. numpy scalars come along."""
    number = float(value)
    return number if math.isfinite(number) else None


def plain(value: object) -> object:
    """Dataclasses and mappings become objects, sequences arrays; what JSON has no word for becomes its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, str | int) else str(value)
