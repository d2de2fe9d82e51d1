"""The words in which two texts differ."""

import pytest

from grmpipe.viewer.word_diff import MOST_WORDS, diff_words


def test_words_that_the_other_text_lacks_are_marked() -> None:
    a, b = diff_words("It is 41, I think.\n", "I know: it is 42, I think.\n")
    assert [text.strip() for text, differs in a if differs] == ["It", "41,"]
    assert [text.strip() for text, differs in b if differs] == ["I know: it", "42,"]


@pytest.mark.parametrize(
    ("a", "b"), [("", ""), ("", "new"), ("  x\n\ty ", "x y"), ("same", "same"), ("w " * (MOST_WORDS + 1), "w w\nv")]
)
def test_the_pieces_are_the_texts(a: str, b: str) -> None:
    for text, side in zip((a, b), diff_words(a, b), strict=True):
        assert "".join(piece for piece, _ in side) == text
        assert a != b or not any(differs for _, differs in side)


def test_a_long_text_is_compared_by_lines() -> None:
    text = "\n".join(f"{number} words" for number in range(MOST_WORDS))
    a, _ = diff_words(text, text.replace("\n7 words", "\n8 words"))
    assert [piece for piece, differs in a if differs] == ["7 words\n"]
