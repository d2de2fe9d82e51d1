"""Calls of tools written as Python: `[f(a=1), g(b="x")]`, or `f(1, 2)` in a line of its own. Pure.

Only literal values are read, from the syntax tree. What can't be read stays in the content, beside an error in words
for the model.
"""

import ast
import re
import warnings
from collections.abc import Sequence

from grmpipe.models.chat.json_tool_calls import Reading
from grmpipe.models.chat.tool_call_checks import MAX_NESTING, check_call, parameters_of, quote_start
from grmpipe.models.types import ParsedTurn, ToolCall, ToolSpec

MAX_CODE_CHARS = 1 << 16  # in one list or call: what Python's parser takes without trouble
JSON_NAMES = {"true": True, "false": False, "null": None}
MARKERS = re.compile(r"<\|(?:python_(?:start|end|tag)|tool_call_(?:start|end))\|>")  # those of Llama 4 and LFM2
LIST_START = r"\[\s*[A-Za-z_][\w.]*\s*\("
PAIRS = {"(": ")", "[": "]", "{": "}"}


def parse_pythonic(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """A list of calls that begins a line, with any names; or a call of one of the tools in a line of its own.

    vLLM reads only the list, and only if it is the whole text. Values without a name are those of the tool's
    parameters, in their order. A word without quotes is a text where the tool's parameter is one.
    """
    completion, text = text, MARKERS.sub("", text)
    names = "|".join(re.escape(tool.name) for tool in tools)
    starts = re.compile(rf"^[ \t]*(?:(?P<list>{LIST_START})|(?:{names or '(?!)'})\()", re.MULTILINE)
    reading, place, known = Reading(), 0, {tool.name: tool for tool in tools}
    while match := starts.search(text, place):
        start, end = match.start(), end_of_brackets(text, match.start())
        line_end = _line_end(text, len(text) if end is None else end)
        if end is not None and not match["list"] and text[end:line_end].strip():
            reading.texts.append(text[place:line_end])  # a sentence that begins with a call
        else:
            reading.texts.append(text[place:start])
            code = text[start : len(text) if end is None else end].strip()
            for found in [_unclosed(code)] if end is None else _calls_in(code, known):
                reading.add(found, code)
            reading.texts.append(text[end:line_end] if end is not None else "")
        place = line_end
    reading.texts.append(text[place:])
    return reading.turn(completion)


def end_of_brackets(text: str, start: int) -> int | None:
    """The place after the bracket that closes the first one from `start` on; None if none does. Texts in quotes are
    skipped.
    """
    awaited: list[str] = []
    quote, place = "", start
    while place < len(text):
        char = text[place]
        if quote:
            if char == "\\":
                place += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in PAIRS:
            awaited.append(PAIRS[char])
        elif awaited and char in ")]}":
            if char != awaited.pop():
                return None
            if not awaited:
                return place + 1
        place += 1
    return None


def _line_end(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _unclosed(code: str) -> str:
    return f"a call is not closed, or its brackets don't match: {quote_start(code)}"


def _calls_in(code: str, known: dict[str, ToolSpec]) -> list[ToolCall | str]:
    """The calls in a list of calls, or in one call."""
    if len(code) > MAX_CODE_CHARS:
        return [f"a call is longer than {MAX_CODE_CHARS} characters: {quote_start(code)}"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as unknown escapes in the model's strings
            body = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [f"a call is not valid Python: {quote_start(code)}"]
    return [_call_of(node, known) for node in (body.elts if isinstance(body, ast.List) else [body])]


def _call_of(node: ast.expr, known: dict[str, ToolSpec]) -> ToolCall | str:
    if not isinstance(node, ast.Call) or not (name := _dotted_name(node.func)):
        return "a list of calls holds something that is not a call"
    if name not in known and node.args:
        return f"there is no tool {quote_start(name)} to whose parameters the values belong"
    parameters = parameters_of(known.get(name))
    arguments: dict[str, object] = {}
    try:
        if len(node.args) > len(parameters):
            return f"{name} takes {len(parameters)} values without names, got {len(node.args)}"
        for parameter, value in zip(parameters, node.args, strict=False):
            arguments[parameter] = parse_value(value, parameters[parameter])
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                return f"the call of {name} gives {keyword.arg or 'an argument'} twice, or without a name"
            arguments[keyword.arg] = parse_value(keyword.value, parameters.get(keyword.arg, False))
    except ValueError as error:
        return f"the arguments of {name} can't be read: {error}"
    return check_call(name, arguments)


def _dotted_name(node: ast.expr) -> str:
    """The name of a function, such as math.add; empty if it is none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < MAX_NESTING:
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def parse_value(node: ast.expr, takes_text: bool = False, room: int = MAX_NESTING) -> object:
    """The JSON value of a literal. Raises ValueError.

    takes_text: whether a word without quotes is a text.
    """
    if not room:
        raise ValueError("they are nested too deeply")
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = parse_value(node.operand, room=room - 1)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.Name):
        if node.id in JSON_NAMES:
            return JSON_NAMES[node.id]
        if takes_text:
            return node.id
    if isinstance(node, ast.List | ast.Tuple):
        return [parse_value(part, room=room - 1) for part in node.elts]
    if isinstance(node, ast.Dict):
        return _object_of(node, room)
    raise ValueError(f"{quote_start(_source_of(node))} is not a literal value")


def _object_of(node: ast.Dict, room: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            raise ValueError("a key of an object is not a text")
        found[key.value] = parse_value(value, room=room - 1)
    return found


def _source_of(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        return "a value"
