"""Values as plain JSON, and as bytes. Pure."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from pydantic_core import PydanticSerializationError, to_json


def finite(value: float) -> float | None:
    """The number; None for NaN and infinity. Accepts numpy scalars."""
    number = float(value)
    return number if math.isfinite(number) else None


def plain(value: object) -> object:
    """The value as JSON types: dataclasses and mappings become objects, sequences arrays, other types their text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def json_bytes(record: Mapping[str, object], *, strict: bool = False) -> bytes:
    """One line of JSON in UTF-8, several times as fast as json.dumps. Raises TypeError for a type that JSON lacks.

    Half of a surrogate pair, which byte-level models sample, becomes a JSON escape. NaN and infinities are written as
    Python's json does; strict: as null, for other readers, and types that JSON lacks as their text.
    """
    try:
        return to_json(record, inf_nan_mode="null" if strict else "constants")
    except PydanticSerializationError:
        text = json.dumps(plain(record) if strict else record, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")
