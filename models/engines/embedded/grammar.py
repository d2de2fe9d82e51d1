"""Regular expressions for sampled text: which tokens may come next."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import cast

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MAX_PATTERNS = 256  # compiled ones that are kept
SILENT = 0  # level of llguidance's log
Matcher = LLMatcher  # how far a text has come in its pattern; `consume_token` takes it further


class Grammar:
    """Patterns over the vocabulary of one tokenizer. `vocab_size` counts the rows of the model's head."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = list(stop_token_ids)
        self._vocab_size = vocab_size
        self._compiled = lru_cache(MAX_PATTERNS)(self._compile)

    def check(self, pattern: str) -> None:
        """Raises ValueError for a pattern that can't be read."""
        self._compiled(pattern)

    def start(self, pattern: str) -> Matcher:
        """The state of an empty text that must match. Raises what `check` raises."""
        return self._compiled(pattern).deep_copy()

    def mask_next_tokens(self, matchers: Sequence[Matcher]) -> Tensor:
        """bool: the tokens that may come next in each text. A stop token may if the pattern may end there, or if no
        other token fits.
        """
        bias = b"".join(matcher.compute_logit_bias() for matcher in matchers)  # a byte for each token
        allowed_NV = torch.frombuffer(bytearray(bias), dtype=torch.uint8).view(len(matchers), -1) > 0
        may_end_N = torch.tensor([matcher.is_accepting() for matcher in matchers]) | ~allowed_NV.any(1)
        allowed_NV[:, self._stop_token_ids] = may_end_N[:, None]
        return allowed_NV

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
