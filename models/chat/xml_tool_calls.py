"""Calls of tools written with tags: qwen3_coder. Pure.

What can't be read stays in the content, beside an error in words for the model.
"""

import json
import re
from collections.abc import Mapping, Sequence

from grmpipe.models.chat.json_tool_calls import CALL_END, Reading
from grmpipe.models.chat.tool_call_checks import check_call, parameters_of, quote_start
from grmpipe.models.types import ParsedTurn, ToolCall, ToolSpec

FUNCTION_START, FUNCTION_END = "<function=", "</function>"
CALL = re.compile(r"(?:<tool_call>\s*)?<function=|<tool_call>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse_qwen3_coder(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, any number of them, with text
    around them.

    As in vLLM, a tag counts wherever it stands, <tool_call> may be missing, and a value is read as JSON where the
    tool's parameter isn't a text. A value can't spell </parameter>.
    """
    reading, place, known = Reading(), 0, {tool.name: tool for tool in tools}
    while match := CALL.search(text, place):
        reading.texts.append(text[place : match.start()])
        end, place = _ends(text, match.end())
        body = text[match.end() : end]
        written = text[match.start() : place]
        if not match.group().endswith(FUNCTION_START):
            reading.add(f"a call has no {FUNCTION_START}..>: {quote_start(body)}", written)
        elif end == len(text):
            reading.add(f"a call is not closed with {FUNCTION_END}: {quote_start(body)}", written)
        else:
            reading.add(_call_of(body, known), written)
    reading.texts.append(text[place:])
    return reading.turn(text)


def _ends(text: str, start: int) -> tuple[int, int]:
    """Where the body of a call ends, and where the text goes on; both at the end of the text if it isn't closed."""
    end = text.find(FUNCTION_END, start)
    if end < 0:
        return len(text), len(text)
    after = end + len(FUNCTION_END)
    closed = re.compile(rf"\s*{CALL_END}").match(text, after)
    return end, closed.end() if closed else after


def _call_of(body: str, known: Mapping[str, ToolSpec]) -> ToolCall | str:
    name, closed, rest = body.partition(">")
    if not closed:
        return f"the tag of a function is not closed: {quote_start(body)}"
    takes_text = parameters_of(known.get(name.strip()))
    arguments: dict[str, object] = {}
    place = 0
    while match := PARAMETER.match(rest, place):
        parameter, place = match[1].strip(), match.end()
        arguments[parameter] = match[2] if takes_text.get(parameter, True) else _value_of(match[2])
    if rest[place:].strip():
        return f"the arguments of {quote_start(name)} can't be read: {quote_start(rest[place:])}"
    return check_call(name.strip(), arguments)


def _value_of(text: str) -> object:
    """A JSON value; a text that is none stays one, and the tool says what it wants."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
