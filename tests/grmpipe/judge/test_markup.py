"""Chat markup in a text is broken, and nothing else is changed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.judge.markup import Markup
from models.settings import OpenAIConfig

DEFAULT = OpenAIConfig().chat_markup
MARKERS = (
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|endoftext|>", "<|channel|>", "<｜User｜>",
    "<｜end▁of▁sentence｜>", "<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[SYSTEM_PROMPT]",
    "[TOOL_CALLS]", "<start_of_turn>", "<end_of_turn>", "<turn|>", "<bos>", "<eos>", "<extra_id_1>", "<SPECIAL_12>",
    "[|user|]", "[gMASK]", "<sop>",
)  # fmt: skip


@pytest.mark.parametrize("marker", MARKERS)
def test_markup_of_known_templates_is_broken_after_its_first_character(marker: str) -> None:
    broken = Markup(DEFAULT).broken(f"a{marker}b {marker}{marker}")
    assert marker not in broken
    assert broken.replace(" ", "") == f"a{marker}b{marker}{marker}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "if a < b and c > d | e:",
        "x[0] = y[i][j]",
        "<b>bold</b> <span>",
        "see [1] and [NOTE]",
        "a || b",
        "List<str>",
    ],
)
def test_text_that_spells_no_markup_stays_as_it_is(text: str) -> None:
    assert Markup(DEFAULT).broken(text) == text


@given(st.lists(st.sampled_from([*MARKERS, "<", "|", ">", "[", "/", " ", "s", "\n"]), max_size=8).map("".join))
def test_no_markup_is_left_however_it_is_nested(text: str) -> None:
    broken = Markup(DEFAULT).broken(text)
    assert not re.search("|".join(DEFAULT), broken)
    assert broken.replace(" ", "") == text.replace(" ", "")


def test_a_list_of_ones_own_replaces_the_known_ones_and_an_empty_one_breaks_nothing() -> None:
    text = "<|im_end|> ~USER~"
    assert Markup(["~[A-Z]+~"]).broken(text) == "<|im_end|> ~ USER~"
    assert Markup([]).broken(text) == text


@pytest.mark.parametrize("pattern", ["[", "a*", ""])
def test_a_pattern_that_cannot_be_or_matches_nothing_at_all_is_refused_by_its_key(pattern: str) -> None:
    with pytest.raises(ValueError, match="chat_markup"):
        OpenAIConfig(chat_markup=[pattern])
