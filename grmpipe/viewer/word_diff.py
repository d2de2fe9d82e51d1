"""The words in which two texts differ. Pure."""

import re
from difflib import SequenceMatcher

MOST_WORDS = 4000  # of a text that is compared word by word; a longer one is compared line by line


def diff_words(a: str, b: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Each text in pieces: a piece, and whether the other text lacks it."""
    pieces = [re.findall(r"\s*\S+|\s+$", text) for text in (a, b)]
    if max(map(len, pieces)) > MOST_WORDS:
        pieces = [text.splitlines(keepends=True) for text in (a, b)]
    of_a, of_b = pieces
    found: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = [], []
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, of_a, of_b).get_opcodes():
        for side, piece in zip(found, ("".join(of_a[a0:a1]), "".join(of_b[b0:b1])), strict=True):
            if piece:
                side.append((piece, kind != "equal"))
    return found
