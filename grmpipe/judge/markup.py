"""Chat markup in a text, broken so that no tokenizer reads it as special tokens. Pure; knows no template or endpoint.

A server that renders chat templates tokenizes the whole string: a role marker spelled in a text becomes a real one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# A space ends the spelling of a special token in every tokenizer we know; some tokenizers drop a zero-width character.
BREAK = " "


class Markup:
    """Finds chat markup by regular expressions. Raises re.error for an expression that doesn't compile."""

    def __init__(self, patterns: Sequence[str]) -> None:
        # A lookahead also finds overlapping matches; the group is their first character.
        self._starts = re.compile(f"(?=(?:{'|'.join(patterns)}))(?P<first>.)", re.DOTALL) if patterns else None

    def broken(self, text: str) -> str:
        """The text with a space after the first character of all that looks like markup."""
        return text if self._starts is None else self._starts.sub(rf"\g<first>{BREAK}", text)
