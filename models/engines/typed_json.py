"""JSON from a server, read with its types. What comes is of the shape that is asked for, or NoAnswer."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")
LogProb = Annotated[float, msgspec.Meta(gt=-1e30, le=1.0)]  # as float32 holds it; NaN isn't within the bounds
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class NoAnswer(Exception):
    """The answer has another shape; the message names the field."""


def read_object(body: str | bytes) -> dict[str, Any]:
    """The JSON object of a body; empty if the body is anything else.

    Halves of surrogate pairs, which JSON can spell but no file, tokenizer or struct takes, are replaced.
    """
    try:
        text = body if isinstance(body, str) else body.decode(json.detect_encoding(body), "surrogatepass")
        value = json.loads(text)
        if "\\u" in text or not text.isascii():
            whole = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
            value = json.loads(whole.decode("utf-16-le", "replace"))
    except (ValueError, RecursionError):  # RecursionError: nested a thousand deep
        return {}
    return value if isinstance(value, dict) else {}


def read_as(kind: type[T], body: Mapping[str, Any]) -> T:
    """The object as this shape; fields that the shape doesn't name are ignored. Raises NoAnswer."""
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, RecursionError) as error:  # also numbers beyond those of a float
        raise NoAnswer(str(error)) from None
