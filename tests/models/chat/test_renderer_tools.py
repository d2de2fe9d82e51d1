"""Conversations with tools are rendered as the model's template writes them, and no text in them becomes markup."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.types import Message, ParsedTurn, ToolCall, ToolSpec
from grmpipe.tiny.resolve import SHIPPED
from grmpipe.tiny.tokenizer import CHAT_TEMPLATE, build_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
# Family: its special tokens, its other added tokens, and the token that ends a turn.
FAMILIES: dict[str, tuple[list[str], list[str], str]] = {
    "tiny": ([], [], "<|im_end|>"),
    "qwen3_tools": ([], ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"], "<|im_end|>"),
    "qwen3_coder_tools": ([], ["<tool_call>", "</tool_call>"], "<|im_end|>"),
    "llama31_tools": (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"], [], "<|eot_id|>"),
    "mistral_tools": (
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [],
        "</s>",
    ),
    "deepseek_r1_tools": (
        ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
        ["<｜tool▁call｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs｜>"],
        "<｜end▁of▁sentence｜>",
    ),
}
ONE_CALL = {"llama31_tools"}  # at a time
SYSTEMLESS = {"mistral_tools"}
LEAVES_OUT_TEXTS = {"llama31_tools", "mistral_tools", "deepseek_r1_tools"}  # beside calls
FORMATS = {
    "tiny": "pythonic",
    "qwen3_tools": "hermes",
    "qwen3_coder_tools": "qwen3_coder",
    "llama31_tools": "llama3_json",
    "mistral_tools": "mistral",
    "deepseek_r1_tools": None,
}
PROPERTIES = {"a": {"type": "integer"}, "who": {"type": "string"}, "data": {"type": "object"}}
TOOLS = (
    ToolSpec(name="look.up", description='Looks "it" up.', parameters={"type": "object", "properties": PROPERTIES}),
    ToolSpec(name="now", description="The time.", parameters={"type": "object", "properties": {}}),
)
WORDS = ["Ida", " has", '"6"', "coins.", "\\n", "ü🙂", "{x}", "it's", "a\nb", "[1]", "a<b", "{{ 1 }}", "%s", "2"]
SPELLED = [
    "<|im_end|>",
    "<|im_start|>",
    "</tool_call>",
    "<tool_call>",
    "<|eot_id|>",
    "[TOOL_CALLS]",
    "</s>",
    "<｜User｜>",
]


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    special, others, _ = FAMILIES[family]
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in others])
    tokenizer.chat_template = (
        CHAT_TEMPLATE if family == "tiny" else (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    )
    return tokenizer


def renderer_of(family: str, **options: Any) -> Renderer:
    tokenizer = tokenizer_of(family)
    stop = tokenizer.get_vocab()[FAMILIES[family][2]]
    return Renderer(tokenizer, context_tokens=512, vocab_size=600, stop_token_ids=(stop,), **options)


def as_dict(message: Message, arguments_as_text: bool) -> dict[str, Any]:
    """As a user of transformers writes it."""
    whole: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        whole |= {"tool_call_id": message.tool_call_id, "name": message.name}
    if message.tool_calls:
        whole["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id,
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False)
                    if arguments_as_text
                    else dict(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return whole


def tool_dict(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def templated(family: str, messages: list[Message], *, with_tools: bool = True, asks_next: bool = True) -> str:
    """What transformers makes of the conversation."""
    as_text = family == "deepseek_r1_tools"
    text = tokenizer_of(family).apply_chat_template(
        [as_dict(message, as_text) for message in messages],
        tools=[tool_dict(tool) for tool in TOOLS] if with_tools else None,
        tokenize=False,
        add_generation_prompt=asks_next,
    )
    assert isinstance(text, str)
    return text


def text_of(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, 5))).strip()


def call_of(rng: random.Random) -> ToolCall:
    values: dict[str, object] = {
        "a": rng.choice([1, -2, 32]),
        "who": text_of(rng),
        "data": {"x": [text_of(rng), 1.5, None, {"a key": text_of(rng)}]},
    }
    kept = {name: values[name] for name in sorted(values, key=lambda _: rng.random())[: rng.randint(0, 3)]}
    return ToolCall(name="look.up", arguments=kept, call_id=f"{rng.randrange(10**9):09d}")


def conversation(family: str, rng: random.Random, num_turns: int) -> list[list[Message]]:
    """A prompt, then per turn the assistant's message with calls and the results; at last an answer."""
    begin = [] if family in SYSTEMLESS or rng.random() < 0.5 else [Message(role="system", content=text_of(rng))]
    parts = [[*begin, Message(role="user", content=text_of(rng))]]
    for _ in range(num_turns):
        calls = tuple(call_of(rng) for _ in range(1 if family in ONE_CALL else rng.randint(1, 3)))
        content = "" if family in LEAVES_OUT_TEXTS or rng.random() < 0.5 else text_of(rng)
        parts.append([Message(role="assistant", content=content, tool_calls=calls)])
        parts.append(
            [Message(role="tool", content=text_of(rng), name=one.name, tool_call_id=one.call_id) for one in calls]
        )
    return parts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_conversation_is_what_the_template_makes_of_it(family: str) -> None:
    rng, renderer = random.Random(family), renderer_of(family)
    for number in range(25):
        messages = [message for part in conversation(family, rng, rng.randint(1, 3)) for message in part]
        if number % 3 == 0:
            messages.append(Message(role="assistant", content=text_of(rng)))
        with_tools = number % 4 > 0
        tools = TOOLS if with_tools else ()
        rendered = renderer.decode_special(renderer.render(messages, tools))
        assert rendered == templated(family, messages, with_tools=with_tools)
        whole = renderer.decode_special(renderer.render_whole(messages, tools))
        assert whole == templated(family, messages, with_tools=with_tools, asks_next=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_then_sampled_then_replies_is_what_the_template_makes_of_the_whole(family: str) -> None:
    rng, renderer, stop = random.Random(family), renderer_of(family), FAMILIES[family][2]
    for _ in range(15):
        parts = conversation(family, rng, rng.randint(1, 3))
        so_far = list(parts[0])
        ids = renderer.render(so_far, TOOLS)
        for turn, results in zip(parts[1::2], parts[2::2], strict=True):
            begun = renderer.decode_special(ids)
            assert begun == templated(family, so_far)
            so_far += [*turn, *results]
            whole = templated(family, so_far)
            assert whole.startswith(begun)
            sampled = whole[len(begun) : whole.index(stop, len(begun))]
            ids += renderer.encode_markup(sampled + stop) + renderer.extend(results, TOOLS)
            unended = renderer.encode_markup(stop) + renderer.extend(results, TOOLS)
            assert renderer.extend(results, TOOLS, ended=False) == unended
        assert renderer.decode_special(ids) == templated(family, so_far)


@pytest.mark.parametrize("family", [family for family, name in FORMATS.items() if name])
def test_calls_that_the_template_writes_are_read_back_by_the_parser_found_in_it(family: str) -> None:
    rng, renderer, stop = random.Random(family), renderer_of(family), FAMILIES[family][2]
    assert renderer.tool_parser_name == FORMATS[family]
    for _ in range(25):
        prompt, [turn] = conversation(family, rng, 1)[:2]
        begun = templated(family, prompt)
        sampled = templated(family, [*prompt, turn, Message(role="tool", content="", tool_call_id="0" * 9)])
        text = renderer.decode(renderer.encode_markup(sampled[len(begun) : sampled.index(stop, len(begun))]))
        parsed = renderer.parse(text, TOOLS)
        calls = turn.tool_calls
        if family != "mistral_tools":
            calls = tuple(ToolCall(name=call.name, arguments=call.arguments) for call in calls)
        assert parsed == ParsedTurn(content=turn.content, tool_calls=calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_of_a_call_or_a_result_becomes_markup(family: str) -> None:
    rng, renderer = random.Random(family), renderer_of(family)
    added = {i for i, token in renderer.tokenizer.added_tokens_decoder.items() if token.content.strip()}

    def markup(token_ids: tuple[int, ...]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in added]

    def spoken(words: list[str]) -> tuple[list[Message], list[Message]]:
        one, other, key = ("".join(rng.choices(words, k=3)) for _ in range(3))
        arguments: dict[str, object] = {"who": one, "data": {"x": [other], key + "\x01": 1}}
        call = ToolCall(name="look.up", arguments=arguments, call_id="0" * 9)
        results = [Message(role="tool", content=other, name="look.up", tool_call_id=one)]
        prompt = [Message(role="user", content=one), Message(role="assistant", content="", tool_calls=(call,))]
        return [*prompt, *results], results

    plain, replies = spoken(["x"])
    for _ in range(10):
        attack, attackers = spoken([*SPELLED, *FAMILIES[family][0], *FAMILIES[family][1], '"}', "\n"])
        assert markup(renderer.render(attack, TOOLS)) == markup(renderer.render(plain, TOOLS)) != []
        assert markup(renderer.extend(attackers, TOOLS)) == markup(renderer.extend(replies, TOOLS))


def test_consecutive_results_share_a_turn_where_the_template_says_so() -> None:
    results = [Message(role="tool", content="1"), Message(role="tool", content="2"), Message(role="user", content="3")]
    assert renderer_of("qwen3_tools").decode_special(renderer_of("qwen3_tools").extend(results, TOOLS)) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", sorted(LEAVES_OUT_TEXTS))
def test_text_next_to_calls_is_left_out_where_the_template_leaves_it_out(family: str) -> None:
    call = ToolCall(name="now", arguments={}, call_id="0" * 9)
    said = [Message(role="user", content="Q"), Message(role="assistant", content="I ask.", tool_calls=(call,))]
    renderer = renderer_of(family)
    assert renderer.decode_special(renderer.render(said, TOOLS)) == templated(family, said)


def test_a_result_is_escaped_where_the_template_writes_it_as_json() -> None:
    renderer = renderer_of("llama31_tools")
    rendered = renderer.decode_special(renderer.extend([Message(role="tool", content='a "b"\n')], TOOLS))
    assert '\n\n"a \\"b\\"\\n"<|eot_id|>' in rendered


def test_thoughts_of_an_earlier_turn_are_kept_and_everything_else_is_the_templates() -> None:
    """The one difference: the template drops what was thought before the last question, and sampled ids stay."""
    renderer = renderer_of("qwen3_tools")
    asked, thought = Message(role="user", content="Q"), "<think>\nhm\n</think>\n\n"
    more = Message(role="user", content="R")
    ids = (
        renderer.render([asked], TOOLS)
        + renderer.encode_markup(f"{thought}A<|im_end|>")
        + renderer.extend([more], TOOLS)
    )
    whole = templated("qwen3_tools", [asked, Message(role="assistant", content=f"{thought}A"), more])
    assert renderer.decode_special(ids).replace(thought, "") == whole


def test_a_template_that_moves_the_tools_is_refused_once_the_user_speaks_again() -> None:
    renderer = renderer_of("mistral_tools")
    result, question = Message(role="tool", content="1", tool_call_id="0" * 9), Message(role="user", content="Q")
    assert renderer.extend([result], TOOLS) and renderer.extend([question])
    with pytest.raises(ValueError, match=r"^chat_template: it moves the list of tools .* messages of role tool"):
        renderer.extend([question], TOOLS)


@pytest.mark.parametrize("template", ["qwen3", "deepseek_r1"])
def test_a_template_that_knows_no_tools_is_refused_by_the_key(template: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    renderer = Renderer(tokenizer, context_tokens=512, vocab_size=600, stop_token_ids=(2,))
    assert not renderer.takes_tools and renderer.tool_parser_name is None
    for ask in (renderer.render, renderer.extend, renderer.render_whole):
        with pytest.raises(
            ValueError, match=r"^chat_template: it has no place for tools; set policy\.path .* Jinja file"
        ):
            ask([Message(role="user", content="Q")], TOOLS)
    with pytest.raises(ValueError, match=r"^tool_parser: .* set policy\.tool_parser .* hermes"):
        renderer.parse("x", TOOLS)
    assert renderer.parse("add(1)", ()) == ParsedTurn(content="add(1)")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_tools(family: str) -> None:
    assert renderer_of(family).takes_tools


@pytest.mark.parametrize("name", [path.name for path in SHIPPED.iterdir() if path.is_dir()])
def test_every_shipped_model_takes_tools_and_calls_them_in_lines(name: str) -> None:
    renderer = Renderer.load(str(SHIPPED / name))
    assert renderer.takes_tools and renderer.tool_parser_name == "pythonic"
    prompt = renderer.decode_special(renderer.render([Message(role="user", content="Q")], TOOLS))
    listed = "<|im_start|>tools\nlook.up(a, who, data)\nnow()<|im_end|>\n"
    assert prompt == f"{listed}<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_that_hides_the_markers_of_calls_has_them_read_without() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = (TEMPLATES / "qwen3_tools.jinja").read_text(encoding="utf-8")
    renderer = Renderer(tokenizer, context_tokens=512, vocab_size=600, stop_token_ids=(2,))
    sampled = renderer.encode_markup('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    parsed = renderer.parse(renderer.decode(sampled), TOOLS)
    assert parsed == ParsedTurn(content="", tool_calls=(ToolCall(name="now", arguments={}),))


def test_a_declared_parser_is_used_instead_of_the_found_one() -> None:
    renderer = renderer_of("deepseek_r1_tools", tool_parser="pythonic")
    assert renderer.parse("now()", TOOLS).tool_calls == (ToolCall(name="now", arguments={}),)


def tool(**fields: Any) -> ToolSpec:
    return ToolSpec(**({"name": "f", "description": "", "parameters": {"type": "object"}} | fields))


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (tool(name="a b"), r"^tools: 'a b' can't be the name of a tool; take 1 to 64 letters"),
        (tool(name=""), r"^tools: '' can't be the name"),
        (tool(name="x" * 65), "can't be the name"),
        (tool(description="Ends <|im_end|> here"), r"^tools: f has a text with markup of the chat template: 'Ends <"),
        (tool(parameters={"properties": {"<tool_call>": {}}}), r"^tools: f has a text with markup"),
        (tool(parameters={"enum": [{"x": "</think>"}]}), r"^tools: f has a text with markup"),
        (tool(parameters={"x": {1, 2}}), r"^tools: the parameters of f are no JSON schema: a value is a set"),
        (tool(parameters={"x": float("nan")}), r"^tools: the parameters of f are no JSON schema"),
    ],
)
def test_a_tool_that_no_template_should_see_is_refused(bad: ToolSpec, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        renderer_of("qwen3_tools").render([Message(role="user", content="Q")], [bad])


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (ToolCall(name="a b", arguments={}), r"^tool_calls: 'a b' is not the name of a tool"),
        (
            ToolCall(name="f", arguments={"x": {1}}),
            r"^tool_calls: the arguments of f can't be written: a value is a set",
        ),
    ],
)
def test_a_call_that_no_template_can_write_is_refused(call: ToolCall, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        renderer_of("qwen3_tools").render([Message(role="assistant", content="", tool_calls=(call,))], TOOLS)


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("{{ call.function.arguments.x | replace('.', '!') }}", "changes the text"),
        ("{{ call.function.name }}", "arguments of a call exactly once"),
        ("{{ call.function.arguments | tojson }}{{ call.function.arguments | tojson }}", "exactly once"),
    ],
)
def test_a_template_that_changes_or_loses_an_argument_is_refused(written: str, complaint: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}[{{ m.content }}"
        f"{{% for call in m.tool_calls or [] %}}{written}{{% endfor %}}]{{% endfor %}}"
    )
    renderer = Renderer(tokenizer, context_tokens=512, vocab_size=600, stop_token_ids=(2,))
    call = ToolCall(name="f", arguments={"x": "y"})
    with pytest.raises(ValueError, match=rf"^chat_template: .*{complaint}"):
        renderer.render([Message(role="assistant", content="a", tool_calls=(call,))])


def test_turns_with_tools_are_extended_in_a_third_of_a_millisecond() -> None:
    """The fastest of many, so that a busy machine doesn't matter."""
    renderer, durations_s = renderer_of("qwen3_tools"), []
    for number in range(200):
        results = [Message(role="tool", content=f"Ida has {number} coins.", tool_call_id=str(number))]
        started_s = time.process_time()
        renderer.extend(results, TOOLS)
        durations_s.append(time.process_time() - started_s)
    assert min(durations_s) < 0.3e-3
