"""Regular expressions that a text is held to while it is sampled: which tokens may come next. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import cast

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MAX_PATTERNS = 256  # compiled ones that are kept
SILENT = 0  # level of llguidance's log


class Grammar:
    """Patterns over the vocabulary of one tokenizer. `vocab_size` counts the rows of the model's head."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = list(stop_token_ids)
        self._vocab_size = vocab_size
        self._compiled = lru_cache(MAX_PATTERNS)(self._compile)

    def check(self, pattern: str) -> None:
        """Raises ValueError for a pattern that no text can be held to."""
        self._compiled(pattern)

    def hold(self, pattern: str) -> Held:
        """The start of a text that matches. Raises what `check` raises."""
        return Held(self._compiled(pattern).deep_copy(), self._stop_token_ids)

    def _compile(self, pattern: str) -> LLMatcher:
        grammar = LLMatcher.grammar_from_regex(pattern)
        if error := LLMatcher.validate_grammar(grammar, self._vocabulary):
            raise ValueError(f"pattern: not a regex that the embedded engine can read: {pattern!r}: {error}")
        return LLMatcher(self._vocabulary, grammar, log_level=SILENT)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Made for the first pattern: 150,000 tokens take more than a second."""
        fast = cast(PreTrainedTokenizerFast, self._tokenizer)  # any other is refused
        try:
            return from_tokenizer(fast, n_vocab=self._vocab_size, eos_token=self._stop_token_ids)
        except ValueError as error:
            raise ValueError(
                f"pattern: the embedded engine can't hold texts of this tokenizer to one: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class Held:
    """How far a text has come in its pattern."""

    matcher: LLMatcher
    stop_token_ids: Sequence[int]

    def allowed_V(self) -> Tensor:
        """bool [V]: tokens that may come next; those that end a text only where the pattern may end, or where the
        vocabulary has no way on."""
        allowed_V = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        allowed_V[self.stop_token_ids] = self.matcher.is_accepting() or not bool(allowed_V.any())
        return allowed_V

    def advance(self, token_id: int) -> None:
        self.matcher.consume_token(token_id)
