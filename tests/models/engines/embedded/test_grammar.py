"""The embedded engine's grammar lets through what Python's `re` does, token by token."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from grmpipe.models.engines.embedded.grammar import Grammar, Matcher
from grmpipe.tiny.tokenizer import PAD, TURN_START, build_tokenizer

SCORE_LINE = r"(?:[^\n]*\n)*[ \t\r]*Score: (?:1|2|3|10)[ \t\r\n]*"
BOXED = r"(?:[^\n]*\n)*(?:[ \t]*[^ \t\n>][^\n]*|[ \t]*)\\boxed\{ *(?:1|10) *, *(?:1|10) *\}[^\\\n]*[ \t\r\n]*"
PATTERNS = (SCORE_LINE, BOXED, "a+b?", "(?:ab|a)*", r"[0-9]{2}[.]\d", "")
TEXTS = st.text(alphabet="ab1023. \n\t>Score: \\boxed{,}é", max_size=25)
TOKENIZER = build_tokenizer()
STOP = TOKENIZER.eos_token_id
PADDING = 3  # rows of a model's head beyond the tokenizer's ids
GRAMMAR = Grammar(TOKENIZER, [STOP], len(TOKENIZER) + PADDING)
PIECES = [*TOKENIZER.encode("Score: 1 10 3\n> fine\\boxed{,}"), STOP]


def allowed_by(matcher: Matcher, grammar: Grammar = GRAMMAR) -> Tensor:
    return grammar.mask_next_tokens([matcher])[0]


def after(text: str, pattern: str) -> Matcher:
    matcher = GRAMMAR.start(pattern)
    for token_id in TOKENIZER.encode(text):
        matcher.consume_token(token_id)
    return matcher


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=TEXTS | st.sampled_from(["Score: 3", "x\nScore: 10\n", "\\boxed{1, 10}", "ab", "aab", "12.3", ""]))
def test_grammar_accepts_what_re_accepts(pattern: str, text: str) -> None:
    matcher, accepts = GRAMMAR.start(pattern), True
    for token_id in TOKENIZER.encode(text):
        accepts = accepts and bool(allowed_by(matcher)[token_id])
        matcher.consume_token(token_id)
    assert (accepts and bool(allowed_by(matcher)[STOP])) == (re.fullmatch(pattern, text) is not None)


@given(choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), pattern=st.sampled_from([SCORE_LINE, BOXED]))
def test_every_draw_of_allowed_tokens_can_still_match_the_pattern(choices: list[int], pattern: str) -> None:
    matcher, token_ids = GRAMMAR.start(pattern), []
    for choice in choices:
        allowed_V = allowed_by(matcher)
        assert allowed_V.any()
        allowed = [token_id for token_id in PIECES if allowed_V[token_id]] or allowed_V.nonzero()[:, 0].tolist()
        token_ids.append(allowed[choice % len(allowed)])
        if token_ids[-1] == STOP:
            assert re.fullmatch(pattern, TOKENIZER.decode(token_ids[:-1]))
            return
        matcher.consume_token(token_ids[-1])


def test_special_tokens_and_rows_without_a_token_are_never_allowed() -> None:
    allowed_V = allowed_by(after("fine", r"[^\n]*"))
    assert len(allowed_V) == len(TOKENIZER) + PADDING
    assert not allowed_V[[*TOKENIZER.convert_tokens_to_ids([PAD, TURN_START])]].any()
    assert not allowed_V[-PADDING:].any()
    assert allowed_V[TOKENIZER.encode(" 12")].all()


def test_a_character_in_two_tokens_is_never_left_half() -> None:
    first, second = TOKENIZER.encode("é")
    matcher = GRAMMAR.start(r"[^\n]*")
    assert not allowed_by(matcher)[second]
    matcher.consume_token(first)
    assert allowed_by(matcher)[second]
    assert not allowed_by(matcher)[[STOP, *TOKENIZER.encode("a")]].any()


def test_a_text_may_end_only_where_the_pattern_does_and_with_any_stop_token() -> None:
    stops = [STOP, TOKENIZER.convert_tokens_to_ids(PAD)]
    grammar, ends = Grammar(TOKENIZER, stops, len(TOKENIZER)), []
    matcher = grammar.start(SCORE_LINE)
    for token_id in TOKENIZER.encode("fine\nScore: 10"):
        ends += allowed_by(matcher, grammar)[stops].tolist()
        matcher.consume_token(token_id)
    assert not any(ends)
    assert allowed_by(matcher, grammar)[stops].all()


def test_each_of_several_texts_has_its_own_row() -> None:
    begun, ended = GRAMMAR.start(SCORE_LINE), after("Score: 10", SCORE_LINE)
    assert GRAMMAR.mask_next_tokens([begun, ended])[:, STOP].tolist() == [False, True]


def test_one_text_leaves_another_of_the_same_pattern_where_it_is() -> None:
    begun = after("Score: ", "Score: (?:1|2)")
    assert not allowed_by(GRAMMAR.start("Score: (?:1|2)"))[STOP]
    begun.consume_token(TOKENIZER.encode("1")[0])
    assert allowed_by(begun)[STOP]


@pytest.mark.parametrize("pattern", ["(?=a)", "(?:a", "[a", "a)", r"\ba"])
def test_a_pattern_that_it_cannot_read_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^pattern: not a regex that the embedded engine can read: "):
        GRAMMAR.check(pattern)


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab={"a": 0})), eos_token="a")
    with pytest.raises(ValueError, match=r"^pattern: the embedded engine can't hold texts of this tokenizer"):
        Grammar(words, [0], 1).check("a")
