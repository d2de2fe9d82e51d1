"""Chat markup in a text, broken so that no tokenizer takes it for its own. Pure; it knows no template and no endpoint.

A server that renders chat templates itself tokenizes the whole string: a role marker that a text spells becomes one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# A special token's spelling ends at a space in no tokenizer known to us; a zero-width character some of them drop.
BREAK = " "


class Markup:
    """What looks like chat markup, by regular expressions. Raises ValueError for one that can't be compiled."""

    def __init__(self, patterns: Sequence[str]) -> None:
        # A lookahead sees overlapping matches too; the group is their first character.
        self._starts = re.compile(f"(?=(?:{'|'.join(patterns)}))(.)", re.DOTALL) if patterns else None

    def broken(self, text: str) -> str:
        """The text with a space after the first character of all that looks like markup."""
        return text if self._starts is None else self._starts.sub(rf"\1{BREAK}", text)
