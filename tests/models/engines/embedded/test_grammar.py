"""The engine's own grammar accepts for a pattern exactly what Python's `re` does, token by token."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.engines.embedded.grammar import Grammar, Held, Pattern

SCORE_LINE = r"(?:[^\n]*\n)*[ \t\r]*Score: (?:1|2|3|10)[ \t\r\n]*"
BOXED = r"(?:[^\n]*\n)*(?:[ \t]*[^ \t\n>][^\n]*|[ \t]*)\\boxed\{ *(?:1|10) *, *(?:1|10) *\}[^\\\n]*[ \t\r\n]*"
PATTERNS = (SCORE_LINE, BOXED, "a+b?", "(?:ab|a)*", r"\d+[.]\d", "")
TEXTS = st.text(alphabet="ab1023. \n\t>Score: \\boxed{,}", max_size=25)
PIECES = ("Score: ", "1", "10", "\n", "> ", "fine", "", "\\boxed{", ", ", "}", " 3\n")
STOP = len(PIECES) - 1 + 1


def decode(token_ids: object) -> str:
    return "".join((*PIECES, "")[token_id] for token_id in token_ids)  # type: ignore[attr-defined]


@settings(deadline=None)
@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=TEXTS | st.sampled_from(["Score: 3", "x\nScore: 10\n", "\\boxed{1, 10}", "ab", "aab", "12.3", ""]))
def test_it_accepts_what_re_accepts(pattern: str, text: str) -> None:
    read = Pattern(pattern)
    assert read.is_end(read.after(read.start, text)) == (re.fullmatch(pattern, text) is not None)


@settings(deadline=None)
@given(choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), pattern=st.sampled_from([SCORE_LINE, BOXED]))
def test_whatever_is_drawn_of_the_allowed_tokens_can_still_end_well(choices: list[int], pattern: str) -> None:
    held = Held.to(pattern, Grammar(decode, len(PIECES) + 1, [STOP]))
    text = ""
    for choice in choices:
        allowed = [token_id for token_id, may in enumerate(held.allowed_V().tolist()) if may]
        token_id = allowed[choice % len(allowed)]
        if token_id == STOP:
            assert re.fullmatch(pattern, text)
            return
        text += decode([token_id])
        held.advance(token_id)
    assert PIECES.index("") not in allowed


def test_a_text_may_end_only_where_the_pattern_does() -> None:
    held = Held.to(SCORE_LINE, Grammar(decode, len(PIECES) + 1, [STOP]))
    ends = []
    for piece in ("fine", "\n", "Score: ", "10"):
        ends.append(bool(held.allowed_V()[STOP]))
        held.advance(PIECES.index(piece))
    assert (ends, bool(held.allowed_V()[STOP])) == ([False] * 4, True)


@pytest.mark.parametrize("pattern", ["(?=a)", "a{2}", "(a)", "(?:a", "[a", "a)", r"\w", "^a", "a**"])
def test_syntax_that_it_does_not_know_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^pattern: the embedded engine can't read it"):
        Pattern(pattern)
