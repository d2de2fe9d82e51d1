"""Markup in a text, broken so that nothing reads it as such: chat markup, a template's markers, signs of a verdict.
Pure.

Markup is also found where only its spelling differs: other white space or none between its words, full-width letters
and brackets, curly quotes, characters that don't show.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence

# A space ends the spelling of a special token in every tokenizer we know; some tokenizers drop a zero-width character.
BREAK = " "
PLAIN = re.compile(r"[\t\n\r -~]*")  # characters that stand for themselves
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
QUOTES = dict.fromkeys("‘’‚‛′", "'") | dict.fromkeys("“”„‟″", '"')
# Not shown, though their category is that of letters and marks: joiners, fillers, variation selectors.
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# The parts of a regular expression: a class, spaces with how often they may stand, anything else.
PART = re.compile(
    r"(?P<class>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<space>(?:\\? )+(?:[*+?]\??|\{\d+(?:,\d*)?\})?)|\\.|.", re.DOTALL
)


class Markup:
    """Finds markup by regular expressions. Raises re.error for an expression that doesn't compile."""

    def __init__(self, patterns: Sequence[str], *, any_case: bool = False) -> None:
        flags = re.DOTALL | re.IGNORECASE if any_case else re.DOTALL
        # A lookahead also finds overlapping matches; the last group is where a match ends.
        alternatives = "|".join(map(with_any_space, patterns))
        self._found = re.compile(f"(?=(?:{alternatives})())", flags) if patterns else None

    def break_markup(self, text: str) -> str:
        """The text with a space in all that looks like markup: after its first character, where that breaks it."""
        places = set(self._breaks(text, range(len(text))))
        if not PLAIN.fullmatch(text):
            places.update(self._breaks(*fold_text(text)))
        cuts = [0, *(place + 1 for place in sorted(places)), len(text)]
        return BREAK.join(text[start:end] for start, end in itertools.pairwise(cuts))

    def _breaks(self, text: str, origins: Sequence[int]) -> Iterator[int]:
        """The places after which a space breaks markup. origins: the place of each character in the text as it is."""
        for match in self._found.finditer(text) if self._found is not None else ():
            start, end = match.start(), match.start(match.re.groups)
            joints = (place for place in range(start, end - 1) if origins[place] != origins[place + 1])
            # Markup may have white space after its first character: a further space there changes nothing.
            breaking = (place for place in joints if not self._is_found(text, start, place + 1, end))
            yield origins[next(breaking, start)]

    def _is_found(self, text: str, start: int, middle: int, end: int) -> bool:
        """Whether the markup from start to end is found with a space in its middle."""
        assert self._found is not None
        before = text[max(0, start - 1) : start]
        return (
            self._found.match(f"{before}{text[start:middle]}{BREAK}{text[middle : end + 1]}", len(before)) is not None
        )


def with_any_space(pattern: str) -> str:
    r"""The regular expression with `\s*` for every space between two others, so that a text may have any or none."""
    parts = [(match[0], match["space"] is not None) for match in PART.finditer(pattern)]
    last = len(parts) - 1
    return "".join(
        (r"\s" if place in (0, last) else r"\s*") if is_space else part for place, (part, is_space) in enumerate(parts)
    )


def fold_text(text: str) -> tuple[str, list[int]]:
    """The text without differences of spelling that don't matter, and the place that each of its characters had."""
    pieces = list(map(fold_character, text))
    return "".join(pieces), [place for place, piece in enumerate(pieces) for _ in piece]


@functools.cache
def fold_character(character: str) -> str:
    """Empty for a character that doesn't show."""
    if character in LINE_BREAKS:
        return "\n"
    if character.isspace() or character == "\N{BRAILLE PATTERN BLANK}":
        return " "
    if unicodedata.category(character) in ("Cc", "Cf") or UNSEEN.match(character):
        return ""
    return QUOTES.get(character) or unicodedata.normalize("NFKC", character)
