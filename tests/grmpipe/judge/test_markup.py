"""Chat markup in a text is broken, and nothing else is changed."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.judge.markup import Markup, with_any_space
from grmpipe.models.settings import OpenAIConfig

DEFAULT = OpenAIConfig().chat_markup
MARKERS = (
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|endoftext|>", "<|channel|>", "<｜User｜>",
    "<｜end▁of▁sentence｜>", "<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[SYSTEM_PROMPT]",
    "[TOOL_CALLS]", "<start_of_turn>", "<end_of_turn>", "<turn|>", "<bos>", "<eos>", "<extra_id_1>", "<SPECIAL_12>",
    "[|user|]", "[gMASK]", "<sop>", "<unused0>", "<start_of_image>", "[UNUSED_TOKEN_146]", "<seed:bos>",
    "]~b]", "]~!b[", "[e~[", "<longcat_user>", "</longcat_s>", "<role>", "</role>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "</tool_response>", "<tools>", "<TOOLCALL>", "<function=add>", "</function>",
    "<parameter=x>", "<arg_key>", "</arg_value>", "</invoke>", "</seed:think>", "<minimax:tool_call>",
    "</minimax:tool_call>", "◁think▷", "◁/think▷", "</｜DSML｜invoke>", "<｜hy_User｜>", "<|im_middle|>",
    "<|START_OF_TURN_TOKEN|>", "<BOS_TOKEN>", "<|start_of_role|>", "<beginning_of_sentence>", "<mask:0>", "<cls>",
    "<thought>", "[ARGS]", "[unused9]", "<reserved_106>", "<TOKENS_UNUSED_1>", "<eoh>", "[sMASK]", "</response>",
)  # fmt: skip


@pytest.mark.parametrize("marker", MARKERS)
def test_markup_of_known_templates_is_broken_after_its_first_character(marker: str) -> None:
    broken = Markup(DEFAULT).break_markup(f"a{marker}b {marker}{marker}")
    assert marker not in broken
    assert broken.replace(" ", "") == f"a{marker}b{marker}{marker}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "if a < b and c > d | e:",
        "x[0] = y[i][j]",
        "<b>bold</b> <span> <response-time> <thinker> <role id=1>",
        "a function(x) -> <T>, <function>, <parameter>",
        "see [1] and [NOTE]",
        "a || b",
        "List<str>",
    ],
)
def test_text_that_spells_no_markup_stays_as_it_is(text: str) -> None:
    assert Markup(DEFAULT).break_markup(text) == text


@given(st.lists(st.sampled_from([*MARKERS, "<", "|", ">", "[", "/", " ", "s", "\n"]), max_size=8).map("".join))
def test_no_markup_is_left_however_it_is_nested(text: str) -> None:
    broken = Markup(DEFAULT).break_markup(text)
    assert not re.search("|".join(DEFAULT), broken)
    assert broken.replace(" ", "") == text.replace(" ", "")


def test_custom_list_replaces_the_known_markers_and_an_empty_one_breaks_none() -> None:
    text = "<|im_end|> ~USER~"
    assert Markup(["~[A-Z]+~"]).break_markup(text) == "<|im_end|> ~ USER~"
    assert Markup([]).break_markup(text) == text


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[The End of", "[ The End of"),
        ("[The\nEnd of", "[ The\nEnd of"),
        ("[The  End\u00a0of", "[ The  End\u00a0of"),
        ("[TheEnd of", "[ TheEnd of"),
        ("\uff3bThe End of", "\uff3b The End of"),
        ("[\u200bT\u00adhe\u2060 End\ufe0f of", "[ \u200bT\u00adhe\u2060 End\ufe0f of"),
        ("[ The End of", "[ The End of"),
        ("[Then the End of", "[Then the End of"),
        ("# Answer", "# A nswer"),  # a further space after the first character would change nothing
        ("#\n\nAnswer", "#\n\nA nswer"),
        ("№w", "№ w"),
        ("It is Model B\u2019s", "It is M odel B\u2019s"),
        ("a {x}  [ ]", "a {x}  [ ]"),
    ],
)
def test_markup_is_found_in_any_white_space_and_width(text: str, broken: str) -> None:
    markup = Markup([r"\[The (?:Start|End) of", "# Answer", "now", r"Model [AB]'s", r"x[ y]\ z"], any_case=True)
    assert markup.break_markup(text) == broken
    assert markup.break_markup(broken) == broken


def test_a_space_of_a_pattern_is_any_white_space_but_not_within_a_class() -> None:
    assert with_any_space(r"a b +c[ d]\ e {2}f\\ g") == r"a\s*b\s*c[ d]\s*e\s*f\\\s*g"
    assert with_any_space(" a []b ]") == r"\sa\s*[]b ]"


def test_a_long_text_is_searched_in_linear_time() -> None:
    markup = Markup([r"\[The (?:Start|End) of", r"\[\["], any_case=True)
    started_s = time.process_time()
    for filling in ("[The ", "[[", "\n", "\u3000", "[The\u00a0", "\u200b", "word "):
        markup.break_markup(filling * 20_000)
    assert time.process_time() - started_s < 2


@pytest.mark.parametrize("pattern", ["[", "a*", ""])
def test_a_pattern_that_cannot_be_or_matches_nothing_at_all_is_refused_by_its_key(pattern: str) -> None:
    with pytest.raises(ValueError, match="chat_markup"):
        OpenAIConfig(chat_markup=[pattern])
