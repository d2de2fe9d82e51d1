"""Calls of tools written as JSON: hermes (Qwen), llama3_json, mistral. Pure.

What can't be read stays in the content, beside an error in words for the model.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grmpipe.models.chat.tool_call_checks import check_call, is_tool_name, quote_start
from grmpipe.models.types import ParsedTurn, ToolCall, ToolSpec

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_START = "[TOOL_CALLS]"
LLAMA_CALL = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
# Possessive: a long run of spaces would be tried in all ways else.
NAMED_CALL = re.compile(r"\s*+([^\s\[{]*+)\s*+(?:\[CALL_ID\]\s*+(\w++)\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
MAX_CALLS = 128  # in one turn
MAX_ERRORS = 16  # in one turn: each is shown to the model
MAX_OBJECTS = 256  # in one turn that are looked into: each may be as deep as the parser goes


@dataclass(slots=True)
class Reading:
    """A turn while it is read: what was found, in order."""

    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, found: ToolCall | str, text: str) -> None:
        """found: a call, or what is wrong with the one in `text`, which then stays text."""
        if len(self.calls) >= MAX_CALLS:
            found = f"only the first {MAX_CALLS} calls of a turn are read"
        if isinstance(found, ToolCall):
            self.calls.append(found)
            return
        self.texts.append(text)
        if found not in self.errors and len(self.errors) < MAX_ERRORS:
            self.errors.append(found)

    def turn(self, text: str) -> ParsedTurn:
        """text: of the completion; it is the content if there was nothing to read."""
        if not self.calls and not self.errors:
            return ParsedTurn(content=text)
        content = "\n".join(filter(None, (part.strip() for part in self.texts)))
        return ParsedTurn(content=content, tool_calls=tuple(self.calls), errors=tuple(self.errors))


def parse_hermes(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`, any number of them, with text around them.

    As in vLLM, a marker counts wherever it stands, also in a quotation or a code block. Other than there, the closing
    marker must follow, and one that an argument spells doesn't count.
    """
    reading, place = Reading(), 0
    while (start := text.find(CALL_START, place)) >= 0:
        reading.texts.append(text[place:start])
        value, after = json_at(text, start + len(CALL_START))
        end = text.find(CALL_END, after)
        place = end + len(CALL_END) if end >= 0 else len(text)
        body = text[start + len(CALL_START) : end if end >= 0 else len(text)]
        if end < 0:
            reading.add(f"a call is not closed with {CALL_END}: {quote_start(body)}", text[start:place])
        elif isinstance(value, JsonProblem) or text[after:end].strip():
            reading.add(f"a call is not one JSON object: {quote_start(body)}", text[start:place])
        else:
            reading.add(parse_call(value, ("arguments",)), text[start:place])
    reading.texts.append(text[place:])
    return reading.turn(text)


def parse_llama3_json(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """`{"name": .., "parameters": {..}}`, also after <|python_tag|>; several are separated by ";".

    As in vLLM, an object may stand anywhere in the text, and "arguments" counts as "parameters". An object with
    neither is text, unless it names one of the tools; so is one that isn't JSON, unless the text begins with it.
    """
    reading, place, search_from, known = Reading(), 0, 0, [tool.name for tool in tools]
    for _ in range(MAX_OBJECTS):
        if not (match := LLAMA_CALL.search(text, search_from)):
            break
        start, before = match.start(), text[place : match.start()].replace(PYTHON_TAG, "").strip("; \n\t")
        value, after = json_at(text, start)
        if isinstance(value, dict) and _is_call(value, known):
            reading.texts.append(before)
            reading.add(parse_call(value, ("arguments", "parameters")), text[start:after])
            place = search_from = after
        elif not isinstance(value, JsonProblem):
            search_from = after
        elif before or reading.texts:
            search_from = match.end()
        else:
            reading.add(f"a call is not a JSON object: {quote_start(text[start:])}", text[start:])
            place = len(text)
            break
    reading.texts.append(text[place:].strip("; \n\t"))
    return reading.turn(text)


def _is_call(value: Mapping[str, object], known: Collection[object]) -> bool:
    return "name" in value and ("parameters" in value or "arguments" in value or value["name"] in known)


def parse_mistral(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """`[TOOL_CALLS] [{"name": .., "arguments": {..}, "id": ..}, ..]` at the end of the text, or, as newer models
    write it, `[TOOL_CALLS]name[ARGS]{..}` for each call.

    A decoder may have left the markers out, because they are special tokens. Then a text counts that begins with such
    a list or call, and with the name of one of the tools.
    """
    before, found, calls = text.partition(MISTRAL_START)
    if not found:
        names = "|".join(re.escape(tool.name) for tool in tools)
        if not tools or not re.match(rf'\s*(?:\[\s*\{{[^{{}}]*"name"\s*:\s*"(?:{names})"|(?:{names})\s*\{{)', text):
            return ParsedTurn(content=text)
        before, calls = "", text
    reading = Reading(texts=[before])
    if calls.lstrip().startswith("["):
        _read_list(reading, calls)
    else:
        _read_named(reading, calls)
    return reading.turn(text)


def _read_list(reading: Reading, calls: str) -> None:
    values, after = json_at(calls, 0)
    if not isinstance(values, list):
        reading.add(f"the calls are not a JSON list: {quote_start(calls)}", calls)
        return
    for value in values:
        reading.add(parse_call(value, ("arguments",)), json.dumps(value, ensure_ascii=False))
    reading.texts.append(calls[after:])


def _read_named(reading: Reading, calls: str) -> None:
    """`name[ARGS]{..}` or `name[CALL_ID]id[ARGS]{..}`, each but the first after its own marker or none."""
    place = 0
    while place < len(calls) and (match := NAMED_CALL.match(calls, place)):
        value, after = json_at(calls, match.end())
        if isinstance(value, JsonProblem):
            name = match[1]
            reading.add(
                f"the arguments of {name} are not a JSON object: {quote_start(calls[match.end() :])}", calls[place:]
            )
            return
        reading.add(check_call(match[1], value, match[2] or ""), calls[place:after])
        place = after
        if calls[place:].lstrip().startswith(MISTRAL_START):
            place = calls.index(MISTRAL_START, place) + len(MISTRAL_START)
    if not place:
        reading.add(f"a call is neither a list nor a name with its arguments: {quote_start(calls)}", calls)
    else:
        reading.texts.append(calls[place:])


@dataclass(frozen=True, slots=True)
class JsonProblem:
    """In place of a value: there is none that can be read."""


def json_at(text: str, start: int) -> tuple[object, int]:
    """The JSON value that begins at `start`, or after spaces, and the place after it; a JsonProblem and `start`
    instead.
    """
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # ValueError: also a number with thousands of digits
        return JsonProblem(), start


def parse_call(value: object, keys: Sequence[str]) -> ToolCall | str:
    """The call in an object with a name and its arguments, which stand under one of the keys."""
    if not isinstance(value, dict):
        return f"a call is not a JSON object: {quote_start(json.dumps(value, ensure_ascii=False))}"
    name = value.get("name")
    if not is_tool_name(name):
        return f'a call has no "name" of a tool: {quote_start(json.dumps(value, ensure_ascii=False))}'
    key = next((key for key in keys if key in value), None)
    if key is None:
        return f'the call of {name} has no "{keys[-1]}"'
    call_id = value.get("id", "")
    return check_call(name, value[key], call_id if is_tool_name(call_id) else "")


DECODER = json.JSONDecoder()
