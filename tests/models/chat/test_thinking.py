"""Thoughts are found by the model's own markers, in its text and in its tokens."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.chat.thinking import ThinkingMarkers, find_markers, with_thought
from grmpipe.models.settings import ModelConfig
from grmpipe.models.types import Completion, VersionSpan
from grmpipe.tiny.tokenizer import build_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
THINK = ThinkingMarkers(open="<think>", close="</think>")
IN_PROMPT = ThinkingMarkers(open="<think>", close="</think>", in_prompt=True)


def tokenizer_with(*markers: str, special: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=special) for text in markers], special_tokens=special)
    return tokenizer


def renderer_of(tokenizer: PreTrainedTokenizerFast, template: str = "", **options: object) -> Renderer:
    if template:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return Renderer(tokenizer, context_tokens=512, vocab_size=600, stop_token_ids=(2,), **options)  # type: ignore[arg-type]


QWEN3 = renderer_of(tokenizer_with("<think>", "</think>"), "qwen3")
SPELLED = renderer_of(build_tokenizer(), thinking_markers=["<think>", "</think>"])
SPECIAL = renderer_of(tokenizer_with("[THINK]", "[/THINK]", special=True))


def mark(renderer: Renderer, token_ids: tuple[int, ...]) -> Completion:
    assert renderer.thinking is not None
    return with_thought(completion_of(renderer, token_ids), renderer.thinking, renderer.decode, renderer.decode_special)


def completion_of(renderer: Renderer, token_ids: tuple[int, ...]) -> Completion:
    return Completion(
        token_ids=token_ids,
        logprobs=(-1.0,) * len(token_ids),
        text=renderer.decode(token_ids),
        finish_reason="stop",
        versions=(VersionSpan(model="m", version=0, start=0, end=len(token_ids)),),
    )


@pytest.mark.parametrize(
    ("markers", "text", "answer"),
    [
        (THINK, "12", "12"),
        (THINK, "<think>\nhm\n</think>\n\n12", "12"),
        (THINK, "\n<think>\n\n</think>\n\n12", "12"),
        (THINK, "<think>hm</think>12</think>13", "12</think>13"),
        (THINK, "<think>\nhm", ""),
        (THINK, "12 <think>hm</think> 13", "12 <think>hm</think> 13"),
        (THINK, "<think>\n> </think>\nhm</think>\n12", "12"),
        (THINK, "<think>\n > it says </think>\nhm", ""),
        (IN_PROMPT, "hm\n</think>\n\n12", "12"),
        (IN_PROMPT, "</think>12", "12"),
        (IN_PROMPT, "<think>\nhm</think>\n12", "12"),
        (IN_PROMPT, "hm", ""),
        (IN_PROMPT, "> </think>\nhm", ""),
    ],
)
def test_the_answer_begins_after_the_thought(markers: ThinkingMarkers, text: str, answer: str) -> None:
    written = Completion(token_ids=(), logprobs=(), text=text, finish_reason="stop", versions=())
    assert with_thought(written, markers, str, str).answer == answer


def test_completion_without_marks_is_all_answer() -> None:
    assert completion_of(QWEN3, QWEN3.encode_markup("<think>hm</think>12")).answer == "<think>hm</think>12"


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "hm", "\n", "> ", "12", " é", "</th", "<|im_end|>"]), max_size=12
)


@given(pieces=PIECES, opened=st.booleans())
@pytest.mark.parametrize("renderer", [QWEN3, SPELLED], ids=["added tokens", "spelled"])
def test_the_tokens_of_a_thought_are_the_fewest_that_hold_its_end(
    renderer: Renderer, pieces: list[str], opened: bool
) -> None:
    ids = renderer.encode_markup(("<think>" if opened else "") + "".join(pieces))
    marked = mark(renderer, ids)
    markers = renderer.thinking
    assert markers is not None
    thought = markers.split_thought(renderer.decode_special(ids))
    if not thought.num_chars:
        assert (marked.thought_tokens, marked.thought_chars) == (0, 0)
    elif thought.is_open:
        assert (marked.thought_tokens, marked.answer) == (len(ids), "")
    else:
        count = marked.thought_tokens
        assert markers.split_thought(renderer.decode_special(ids[:count])).has_ended
        assert not markers.split_thought(renderer.decode_special(ids[: count - 1])).has_ended
        assert marked.text[: marked.thought_chars].endswith("</think>")
        assert marked.text == marked.text[: marked.thought_chars] + marked.text[marked.thought_chars :]
        assert renderer.decode(ids[:count]).startswith(marked.text[: marked.thought_chars])


def test_markers_that_are_special_tokens_are_found_though_the_text_lacks_them() -> None:
    ids = SPECIAL.encode_markup("[THINK]hm[/THINK]12<|im_end|>")
    marked = mark(SPECIAL, ids)
    assert (marked.text, marked.answer) == ("hm12", "12")
    assert SPECIAL.decode_special(ids[: marked.thought_tokens]) == "[THINK]hm[/THINK]"


def test_qwen3_thinks_unless_its_template_has_thought_already() -> None:
    close_id = QWEN3.tokenizer.convert_tokens_to_ids("</think>")
    assert QWEN3.thinking == ThinkingMarkers(open="<think>", close="</think>", close_id=close_id)
    silent = renderer_of(QWEN3.tokenizer, chat_template_kwargs={"enable_thinking": False}).thinking
    assert silent == ThinkingMarkers(open="<think>", close="</think>", is_off=True, close_id=close_id)


def test_a_template_may_open_the_thought_in_the_prompt() -> None:
    found = renderer_of(build_tokenizer(), "deepseek_r1").thinking
    assert found == ThinkingMarkers(open="<think>", close="</think>", in_prompt=True)


def test_markers_are_found_declared_or_none() -> None:
    assert renderer_of(build_tokenizer()).thinking is None
    assert renderer_of(tokenizer_with("<think>", "</think>"), thinking_markers=[]).thinking is None
    declared = renderer_of(build_tokenizer(), thinking_markers=["<reason>", "</reason>"]).thinking
    assert declared == ThinkingMarkers(open="<reason>", close="</reason>")


@pytest.mark.parametrize("markers", [["<think>"], ["<think>", "<think>"], ["<think>", " "], ["a", "b", "c"]])
def test_markers_are_two_different_texts_or_none(markers: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^thinking_markers: expected .* type thinking_markers="):
        ModelConfig(thinking_markers=markers)


@pytest.mark.parametrize("filling", ["</think>", "> </think>", "\n> </think>", "<think>", " \n", "> "])
def test_a_thought_is_found_in_linear_time(filling: str) -> None:
    started_s = time.process_time()
    for text in (filling * 20_000, "<think>" + filling * 20_000, "<think>\n> " + filling * 20_000):
        THINK.split_thought(text)
        IN_PROMPT.split_thought(text)
    assert time.process_time() - started_s < 0.5


def test_markers_are_found_where_a_template_wants_a_system_message() -> None:
    tokenizer = tokenizer_with("<think>", "</think>")
    wants = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    tokenizer.chat_template = wants + (TEMPLATES / "deepseek_r1.jinja").read_text(encoding="utf-8")
    found = renderer_of(tokenizer).thinking
    assert found is not None and found.in_prompt


def test_a_generation_prompt_that_begins_a_thought_suffices() -> None:
    """R1-Zero's template asks in words for the end of the thought, and never writes it."""
    markers = find_markers(None, lambda text: None, "... {{ 'Assistant: <think>' }}", "\nAssistant: <think>")
    assert markers is not None and markers.in_prompt and (markers.open, markers.close) == ("<think>", "</think>")
    assert markers.split_thought("6 x 7 = 42 </think> 42").num_chars == len("6 x 7 = 42 </think>")
    assert find_markers(None, lambda text: None, "... <think> ...", "\nAssistant:") is None
