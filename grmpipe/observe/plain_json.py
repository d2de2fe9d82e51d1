"""Values as plain JSON, and as bytes. Pure."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from grmpipe.config.keys.user_code import describe_error


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
    """One line of JSON in UTF-8, several times as fast as json.dumps. Raises TypeError that begins with the place of a
    value that can't be written, as in `prompt.info.image`.

    Half of a surrogate pair, which byte-level models sample, becomes a JSON escape. NaN and infinities are written as
    Python's json does; strict: as null, for other readers, and types that JSON lacks as their text.
    """
    try:
        return to_json(record, inf_nan_mode="null" if strict else "constants")
    except PydanticSerializationError:
        try:
            text = json.dumps(plain(record) if strict else record, ensure_ascii=False, separators=(",", ":"))
        except Exception as error:  # a value of the user's may raise anything
            raise TypeError(find_unwritable(record) or describe_error(error)) from error
        return text.encode("utf-8", "backslashreplace")


def find_unwritable(value: Any, place: str = "", depth: int = 0) -> str:
    """The place of the first value that JSON has nothing for, and what it is; empty if there is none."""
    if depth > 100:
        return f"{place[:100]}..: lists or objects that are nested too deeply, or in themselves"
    kind = type(value)  # not isinstance, which asks the value
    if issubclass(kind, Mapping):
        entries = {f"{place}.{key}".lstrip("."): one for key, one in value.items()}
    elif issubclass(kind, list | tuple):
        entries = {f"{place}[{index}]": one for index, one in enumerate(value)}
    else:
        is_known = value is None or issubclass(kind, str | int | float)
        return "" if is_known else f"{place}: a value of type {kind.__name__}, which JSON has nothing for"
    return next(filter(None, (find_unwritable(one, inner, depth + 1) for inner, one in entries.items())), "")
