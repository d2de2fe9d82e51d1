"""Drafts of tokens by n-grams: what followed the last tokens before, in any text of the engine. Pure.

A judge repeats what it judges, and what it wrote about siblings. The model decides on each drafted token, so a draft is
only a guess (prompt lookup decoding, as in vLLM; SGLang's NGRAM keeps the n-grams of earlier requests too).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONG, SHORT = 6, 3  # tokens of an n-gram; the longer one counts if it is known
MAX_NGRAMS = 1 << 18  # about 60 MB; then the table begins anew
LONGEST_DRAFT = 4
MAX_FED_TOKENS = 128  # for all rows in one pass, drafts included


class NgramTable:
    """The token that followed each n-gram last."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}

    def follow(self, prompt_ids: Sequence[int]) -> RowDraft:
        """The drafts of a text that begins with this prompt."""
        if len(self._next) > MAX_NGRAMS:
            self._next.clear()
        self.learn(prompt_ids, 0)
        return RowDraft(self, [*prompt_ids[-LONG:]])

    def learn(self, token_ids: Sequence[int], start: int) -> None:
        """Note which n-grams the tokens of a text follow, from `start` on."""
        for end in range(max(start, SHORT), len(token_ids)):
            self._next[tuple(token_ids[end - SHORT : end])] = token_ids[end]
            if end >= LONG:
                self._next[tuple(token_ids[end - LONG : end])] = token_ids[end]

    def after(self, token_ids: Sequence[int]) -> int | None:
        """The token that followed these last tokens; None if they are new."""
        found = self._next.get(tuple(token_ids[-LONG:]))
        return self._next.get(tuple(token_ids[-SHORT:])) if found is None else found


@dataclass(slots=True, eq=False)
class RowDraft:
    """The drafts of one row. text: from its prompt's last tokens on. `length` follows what was accepted lately."""

    table: NgramTable
    text: list[int]
    length: int = LONGEST_DRAFT
    num_drafted: int = 0
    num_accepted: int = 0

    def propose(self, most: int) -> list[int]:
        """The tokens that may come next."""
        text = self.text[-LONG:]
        known = len(text)
        for _ in range(min(self.length, most)):
            token_id = self.table.after(text)
            if token_id is None:
                break
            text.append(token_id)
        return text[known:]

    def settle(self, num_drafted: int, token_ids: Sequence[int]) -> None:
        """Take the sampled tokens: those of the draft that were right, and one more unless the row ended."""
        start, num_accepted = len(self.text), len(token_ids) - 1
        self.text += token_ids
        self.table.learn(self.text, start)
        if num_drafted:
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted
            was_right = num_accepted >= num_drafted
            self.length = min(2 * self.length if was_right else num_accepted + 1, LONGEST_DRAFT)
