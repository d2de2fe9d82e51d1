"""Calls of tools are read from what models write, and nothing that they write is executed or raises."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from grmpipe.models.chat.json_tool_calls import MAX_CALLS, MAX_ERRORS
from grmpipe.models.chat.tool_calls import FORMATS, check_tool_parser, detect_format, parser_named, read_turn
from grmpipe.models.settings import PolicyConfig
from grmpipe.models.types import ParsedTurn, ToolCall, ToolSpec


def spec(name: str, **types: str) -> ToolSpec:
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    return ToolSpec(name=name, description="", parameters={"type": "object", "properties": properties})


TOOLS = (
    spec("add", a="integer", b="integer"),
    spec("get", who="string"),
    spec("put", data="object", tags="array", note="string", sure="boolean"),
    spec("now"),
)


def read(name: str, text: str, tools: Sequence[ToolSpec] = TOOLS) -> ParsedTurn:
    return read_turn(FORMATS[name].parse, text, tools)


ADD = ToolCall(name="add", arguments={"a": 1, "b": 2})
IDA = ToolCall(name="get", arguments={"who": "Ida"})
NESTED = ToolCall(name="put", arguments={"data": {"x": [1, {"y": None}]}, "note": 'a "b"\n</p> ü 🙂'})
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
HERMES_IDA = '<tool_call>{"name": "get", "arguments": {"who": "Ida"}}</tool_call>'
CODER_ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)
NESTED_JSON = r'{"data": {"x": [1, {"y": null}]}, "note": "a \"b\"\n</p> ü 🙂"}'

READ = [
    ("hermes", HERMES_ADD, "", [ADD]),
    ("hermes", f"Let me add.\n{HERMES_ADD}\n{HERMES_IDA}", "Let me add.", [ADD, IDA]),
    ("hermes", f"{HERMES_ADD} then {HERMES_IDA} done", "then\ndone", [ADD, IDA]),
    ("hermes", f'<tool_call>{{"name": "put", "arguments": {NESTED_JSON}}}</tool_call>', "", [NESTED]),
    (
        "hermes",
        '<tool_call>{"name": "get", "arguments": {"who": "</tool_call>"}}</tool_call>',
        "",
        [ToolCall(name="get", arguments={"who": "</tool_call>"})],
    ),
    ("hermes", '<tool_call>{"arguments": {}, "name": "gone"}</tool_call>', "", [ToolCall(name="gone", arguments={})]),
    ("hermes", f"> {HERMES_ADD}", ">", [ADD]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
    (
        "llama3_json",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "get", "arguments": {"who": "Ida"}}',
        "",
        [ADD, IDA],
    ),
    ("llama3_json", f'{{"type": "function", "name": "put", "parameters": {NESTED_JSON}}}', "", [NESTED]),
    ("llama3_json", 'Here: {"name": "get", "parameters": {"who": "Ida"}}', "Here:", [IDA]),
    (
        "llama3_json",
        '{"name": "get", "parameters": {"who": "{\\"name\\": 1}"}}',
        "",
        [ToolCall(name="get", arguments={"who": '{"name": 1}'})],
    ),
    ("pythonic", "[add(a=1, b=2)]", "", [ADD]),
    ("pythonic", '[add(a=1, b=2), get(who="Ida")]', "", [ADD, IDA]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [ToolCall(name="now", arguments={})]),
    ("pythonic", "add(1, 2)", "", [ADD]),
    ("pythonic", " add( 1, b=2)\nget( Ida)", "", [ADD, IDA]),
    ("pythonic", "I add.\nadd( 1, 2)\nThen I see.", "I add.\nThen I see.", [ADD]),
    ("pythonic", "add( 1,\n 2)", "", [ADD]),
    ("pythonic", "[other(x=-1.5)]", "", [ToolCall(name="other", arguments={"x": -1.5})]),
    ("pythonic", "[math.add(a=+1)]", "", [ToolCall(name="math.add", arguments={"a": 1})]),
    (
        "pythonic",
        "put({'x': [1, (True, none)]}, sure=true)".replace("none", "null"),
        "",
        [ToolCall(name="put", arguments={"data": {"x": [1, [True, None]]}, "sure": True})],
    ),
    ("pythonic", 'get("a)\\"]\\n ü 🙂")', "", [ToolCall(name="get", arguments={"who": 'a)"]\n ü 🙂'})]),
    ("qwen3_coder", CODER_ADD, "", [ADD]),
    ("qwen3_coder", f"I add.\n\n{CODER_ADD}\n{CODER_ADD}", "I add.", [ADD, ADD]),
    ("qwen3_coder", "<function=get><parameter=who>\nIda\n</parameter></function>", "", [IDA]),
    (
        "qwen3_coder",
        '<tool_call><function=put>\n<parameter=data>\n{"x": [1]}\n</parameter>\n'
        "<parameter=note>\na\n\n<b> ü\n</parameter>"
        "\n<parameter=sure>True</parameter>\n<parameter=tags>none</parameter></function></tool_call>",
        "",
        [ToolCall(name="put", arguments={"data": {"x": [1]}, "note": "a\n\n<b> ü", "sure": True, "tags": "none"})],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ADD]),
    (
        "mistral",
        'So. [TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abc123def"}, '
        '{"name": "get", "arguments": {"who": "Ida"}}]',
        "So.",
        [ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="abc123def"), IDA],
    ),
    ("mistral", ' [{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ADD]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]get{"who": "Ida"}', "", [ADD, IDA]),
    ("mistral", 'add{"a": 1, "b": 2}get{"who": "Ida"}', "", [ADD, IDA]),
    (
        "mistral",
        '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}',
        "",
        [ToolCall(name="now", arguments={}, call_id="abc123def")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), READ)
def test_a_call_is_read_as_it_was_meant(name: str, text: str, content: str, calls: list[ToolCall]) -> None:
    assert read(name, text) == ParsedTurn(content=content, tool_calls=tuple(calls))


PLAIN = [
    "",
    "  The answer is 7.\n",
    "a < b",
    "```\nx = {}\n```",
    r"\boxed{42}",
    '{"score": 1}',
    "[1](https://x.y)",
    '{"name": "Ida", "coins": 7}',
    '[{"name": "Ida"}]',
    '{"name": [1]}',
    "<|python_tag|>1",
    "f(x)",
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", PLAIN)
def test_a_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert read(name, text) == ParsedTurn(content=text)


@pytest.mark.parametrize("text", ["add (1, 2) gives 3", "add(1, 2) gives 3", "So add(1, 2)", "gone(1, 2)", "adds(1)"])
def test_a_call_of_an_unknown_name_or_within_a_sentence_is_text_without_brackets(text: str) -> None:
    assert read("pythonic", text) == ParsedTurn(content=text)


UNREAD = [
    ("hermes", HERMES_ADD[:-3], "not closed with </tool_call>"),
    ("hermes", HERMES_ADD[:30], "not closed"),
    ("hermes", "<tool_call>", "not closed"),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "not one JSON object"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}} {}</tool_call>', "not one JSON object"),
    ("hermes", "<tool_call>[1]</tool_call>", r"a call is not a JSON object: \[1\]"),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'the call of add has no "arguments"'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name" of a tool'),
    ("hermes", '<tool_call>{"name": "<|im_end|>", "arguments": {}}</tool_call>', 'no "name" of a tool'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "arguments of add are not a JSON object"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "too large, or is none"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "too large, or is none"),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": {10**30}}}}}</tool_call>', "a number is too large"),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "not one JSON object"),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"who": "\\ud800"}}</tool_call>', "half a character"),
    ("hermes", f'<tool_call>{{"name": "put", "arguments": {{"data": {"[" * 99}{"]" * 99}}}}}</tool_call>', "nested"),
    ("hermes", f'<tool_call>{{"name": "put", "arguments": {{"data": {"[" * 99999}', "not closed"),
    ("hermes", f"<tool_call>{'[' * 99999}</tool_call>", "not one JSON object"),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1,', "not a JSON object"),
    ("llama3_json", '<|python_tag|>{"name": "add", "par', "not a JSON object"),
    ("llama3_json", '{"name": "add"}', 'the call of add has no "parameters"'),
    ("llama3_json", '{"name": "add", "parameters": [1, 2]}', "arguments of add are not a JSON object"),
    ("pythonic", "add( 1, 2", "not closed"),
    ("pythonic", "[add(a=1, b=2)", "not closed"),
    ("pythonic", "[add(a=1, b=2}]", "brackets don't match"),
    ("pythonic", 'get("Ida)', "not closed"),
    ("pythonic", "add( 1 2)", "not valid Python"),
    ("pythonic", "add(1, 2, 3)", "add takes 2 values without names, got 3"),
    ("pythonic", "add(1, a=2)", "gives a twice"),
    ("pythonic", "add(**{})", "without a name"),
    ("pythonic", "[gone(1)]", "there is no tool gone"),
    ("pythonic", "add(a, b)", "'?a'? is not a literal value"),
    ("pythonic", "add(1 + 1, 2)", r"1 \+ 1 is not a literal value"),
    ("pythonic", "put({1: 2})", "a key of an object is not a text"),
    ("pythonic", "put(b'x')", "not a literal value"),
    ("pythonic", "[f(x)(a=1)]", "something that is not a call"),
    ("pythonic", f"add({'9' * 5000}, 2)", "not valid Python"),
    ("pythonic", f"put({'[' * 150}{']' * 150})", "nested too deeply"),
    ("pythonic", f"put({'-' * 60000}1)", ""),
    ("pythonic", f"put(a{'.b' * 30000})", ""),
    ("pythonic", f"put({'1+' * 30000}1)", ""),
    ("pythonic", f"put({'(' * 30000}{')' * 30000})", "not valid Python"),
    ("pythonic", f"get('{'x' * 70000}')", "longer than 65536"),
    ("qwen3_coder", CODER_ADD[:40], "not closed with </function>"),
    ("qwen3_coder", "<tool_call>\nadd\n</tool_call>", "no <function="),
    ("qwen3_coder", "<function=add><parameter=a>1</function>", "the arguments of add can't be read: <parameter=a>1"),
    ("qwen3_coder", "<function=add><a>1</a></function>", "can't be read"),
    ("qwen3_coder", "<function=a b></function>", "'a b' is not the name of a tool"),
    ("mistral", "[TOOL_CALLS] add", "neither a list nor a name"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "argum', "not a JSON list"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1', "the arguments of add are not a JSON object"),
    ("mistral", "[TOOL_CALLS] [1]", "a call is not a JSON object: 1"),
]


@pytest.mark.parametrize(("name", "text", "complaint"), UNREAD)
def test_a_call_that_cannot_be_read_is_an_error_in_few_words_and_stays_text(
    name: str, text: str, complaint: str
) -> None:
    turn = read(name, text)
    assert not turn.tool_calls and len(turn.errors) == 1
    assert re.search(complaint, turn.errors[0]) and len(turn.errors[0]) < 200
    assert turn.content and turn.content in text


def test_readable_one_of_two_calls_is_read() -> None:
    broken = '<tool_call>{"name": "add",}</tool_call>'
    turn = read("hermes", f"{broken}\n{HERMES_IDA}")
    assert turn.tool_calls == (IDA,) and len(turn.errors) == 1 and turn.content == broken
    assert read("pythonic", "[add(a=1), 2]").errors == ("a list of calls holds something that is not a call",)
    assert read("pythonic", "add(1)\nadd(2 3)").tool_calls == (ToolCall(name="add", arguments={"a": 1}),)


def test_a_turn_has_no_more_errors_than_the_limit() -> None:
    broken = "".join(f"<tool_call>{number}</tool_call>" for number in range(MAX_ERRORS + 3))
    assert len(read("hermes", broken).errors) == MAX_ERRORS and read("hermes", broken).content.count("call>") > 30


def test_a_turn_has_no_more_calls_than_the_limit() -> None:
    turn = read("hermes", HERMES_ADD * (MAX_CALLS + 3))
    assert turn.tool_calls == (ADD,) * MAX_CALLS
    assert turn.errors == (f"only the first {MAX_CALLS} calls of a turn are read",)


TOKENS = [
    "<tool_call>", "</tool_call>", "<function=", "add", ">", "</function>", "<parameter=", "</parameter>",
    "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", "(", ")", '"', "'", "\\", ",", ":", ";", '"name"', '"arguments"',
    '"parameters"', "add(", "1", "-", "\n", " ", "=", "get", "a", '{"name": "add", "arguments": {', "ü", "lambda", "*",
    "\x00", "\ud800", "f'{",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_garbage_never_raises_and_never_becomes_more_than_literal_values(name: str) -> None:
    rng = random.Random(name)
    for _ in range(1500):
        text = "".join(rng.choices(TOKENS, k=rng.randint(1, 24)))
        for call in read(name, text).tool_calls:
            assert set(map(type, call.arguments.values())) <= {str, int, float, bool, list, dict, type(None)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "begin", ["", "<tool_call>", "<function=a>", "[TOOL_CALLS]", "[TOOL_CALLS]add", "[", "add(", "{"]
)
@pytest.mark.parametrize(
    "bomb",
    ['{"name":', '{"name": {', "<tool_call>", "<function=a>", "[add(", "add(1)\n", "add(", '"', " ", "\n", "{ ", "a"],
)
def test_long_garbage_takes_no_time_that_grows_with_its_square(name: str, begin: str, bomb: str) -> None:
    started_s = time.process_time()
    read(name, begin + bomb * (50_000 // len(bomb)))
    assert time.process_time() - started_s < 0.5


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>{"name": .., "arguments": ..}</tool_call>', "hermes"),
        ('"<tool_call>\\n{\\"name\\": .., \\"arguments\\": ..}\\n</tool_call>"', "hermes"),
        ("<tool_call>{{ call.arguments }}<arg_key>", None),
        ("<tool_call><function={{ name }}>..", "qwen3_coder"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ 'Environment: ipython' }}{{ '\"parameters\": ' }}{{ tool_call.name + \".call(\" }}", "llama3_json"),
        ("{{ tool_call.name + '(' -}} ipython", "pythonic"),
        ("{{ messages }}", None),
    ],
)
def test_a_format_is_found_in_the_template(template: str, name: str | None) -> None:
    assert detect_format(template) == name


def test_where_the_marker_is_a_special_token_the_calls_are_read_without_it() -> None:
    template = '<tool_call>{"name": .., "arguments": ..}</tool_call>'
    assert detect_format(template, ["<|im_end|>"]) == "hermes"
    assert detect_format(template, ["<|im_end|>", "<tool_call>"]) == "llama3_json"
    unmarked = HERMES_ADD.replace("<tool_call>", "").replace("</tool_call>", "")
    assert read("llama3_json", unmarked * 2).tool_calls == (ADD, ADD)


def test_custom_parser_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_calls.py").write_text(
        "from grmpipe.models.types import ParsedTurn, ToolCall\n"
        "def shouted(text, tools):\n"
        "    return ParsedTurn(content='', tool_calls=(ToolCall(name=text.lower(), arguments={}),))\n"
        "def wrong(text, tools):\n    return text\n"
        "def narrow(text):\n    return text\n"
        "def strict(text, tools):\n    return json.loads(text)\n"
        "import json\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_calls", raising=False)
    check_tool_parser("my_calls.shouted")
    turn = parser_named("my_calls.shouted")("NOW", TOOLS)
    assert turn.tool_calls == (ToolCall(name="now", arguments={}),)
    (error,) = parser_named("my_calls.strict")("{", TOOLS).errors
    assert error.startswith("the call can't be read (JSONDecodeError: ")
    with pytest.raises(ValueError, match=r"^tool_parser: my_calls\.wrong must return a ParsedTurn, and returned a str"):
        parser_named("my_calls.wrong")("", TOOLS)
    for name in ("my_calls.narrow", "my_calls.gone", "my_calls.ParsedTurn"):
        with pytest.raises(ValueError, match=r"^tool_parser: my_calls\.\w+ must be a function that takes"):
            check_tool_parser(name)
    with pytest.raises(ValueError, match=r"^tool_parser: no_such_module can't be imported .* PYTHONPATH"):
        check_tool_parser("no_such_module.parse")


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^tool_parser: unknown value 'hermse'; known: auto, qwen3_coder, hermes, .*"):
        PolicyConfig(tool_parser="hermse")
    assert PolicyConfig(tool_parser="hermes").tool_parser == "hermes" and PolicyConfig().tool_parser == "auto"
