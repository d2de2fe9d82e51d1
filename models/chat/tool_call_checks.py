"""What any call of a tool must be, in whatever format it was written: a plain name, and arguments that JSON can hold.

Names no format.
"""

import math
import re
from collections.abc import Mapping

from grmpipe.models.types import ToolCall, ToolSpec

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NESTING = 32  # lists and objects within each other: deeper ones end in errors of recursion elsewhere
MAX_INTEGER = 2**63  # the largest that every reader of journals takes
QUOTED_CHARS = 80


def is_tool_name(name: object) -> bool:
    return isinstance(name, str) and TOOL_NAME.fullmatch(name) is not None


def quote_start(text: str) -> str:
    """The beginning of a text in one line, for an error."""
    line = " ".join(text.split())
    return line if len(line) <= QUOTED_CHARS else line[:QUOTED_CHARS] + " .."


def check_call(name: object, arguments: object, call_id: str = "") -> ToolCall | str:
    """The call, or what is wrong with it."""
    if not is_tool_name(name):
        return f"{quote_start(repr(name))} is not the name of a tool"
    assert isinstance(name, str)
    if not isinstance(arguments, Mapping):
        return f"the arguments of {name} are not a JSON object: {quote_start(repr(arguments))}"
    if problem := find_problem(arguments):
        return f"the arguments of {name} can't be read: {problem}"
    return ToolCall(name=name, arguments=arguments, call_id=call_id)


def parameters_of(tool: ToolSpec | None) -> dict[str, bool]:
    """The names of a tool's parameters, in order, each with whether it takes a text; empty for an unknown tool."""
    properties = tool.parameters.get("properties") if tool else None
    if not isinstance(properties, Mapping):
        return {}
    types = {name: schema.get("type") if isinstance(schema, Mapping) else None for name, schema in properties.items()}
    return {
        name: not kind or kind == "string" or (isinstance(kind, list) and "string" in kind)
        for name, kind in types.items()
    }


def find_problem(value: object, room: int = MAX_NESTING) -> str:
    """Why a value can't be an argument; empty if it can."""
    if isinstance(value, str):
        return "" if _is_unicode(value) else "a text has half a character (a lone surrogate)"
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, int):
        return "" if -MAX_INTEGER <= value < MAX_INTEGER else "a number is too large"
    if isinstance(value, float):
        return "" if math.isfinite(value) else "a number is too large, or is none"
    if not room:
        return "they are nested too deeply"
    if isinstance(value, Mapping):
        parts: list[object] = [*value.keys(), *value.values()]
        if not all(isinstance(key, str) for key in value):
            return "a key of an object is not a text"
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        return f"a value is a {type(value).__name__}"
    return next(filter(None, (find_problem(part, room - 1) for part in parts)), "")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
