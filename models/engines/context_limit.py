"""Requests that an engine refuses before its model sees them: texts longer than its window, unknown ids, invalid
sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.types import EngineRefused, PromptScoring, SamplingParams


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The most tokens of a request, prompt and new ones together, and the valid ids."""

    model_name: str
    tokens: int
    vocab_size: int

    @staticmethod
    def of(model_name: str, renderer: Renderer, max_context_tokens: int) -> ContextLimit:
        """`max_context_tokens`: 0 for the model's window. Raises ValueError if it exceeds that."""
        if max_context_tokens > renderer.context_tokens:
            raise ValueError(
                f"max_context_tokens: {max_context_tokens} exceeds the model's context window of "
                f"{renderer.context_tokens} tokens; set at most that (0: all of it)"
            )
        return ContextLimit(model_name, max_context_tokens or renderer.context_tokens, renderer.vocab_size)

    def check_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises EngineRefused for a request that can't be served."""
        if params.scoring is not None:
            self.check_text(prompt_ids)
            check_scoring(len(prompt_ids), params.scoring)
            return
        if len(prompt_ids) + params.max_new_tokens > self.tokens:
            raise EngineRefused(
                f"a prompt of {len(prompt_ids)} tokens and {params.max_new_tokens} new ones exceed the context window "
                f"of {self.tokens} tokens of {self.model_name}"
            )
        self._check_ids(prompt_ids)
        are_limits = 0 < params.top_p <= 1 and params.top_k >= 0 and 0 <= params.min_p <= 1
        if params.max_new_tokens < 1 or params.temperature < 0 or not are_limits or "" in params.stop:
            raise EngineRefused(f"these sampling parameters can't be served: {params}")

    def check_text(self, token_ids: Sequence[int]) -> None:
        """Check a text to be scored. Raises EngineRefused."""
        self._check_ids(token_ids)
        if len(token_ids) > self.tokens:
            raise EngineRefused(
                f"{len(token_ids)} tokens exceed the context window of {self.tokens} of {self.model_name}"
            )

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Check the ids: an invalid one would end the engine for all its requests."""
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise EngineRefused(f"expected one or more ids from 0 to {self.vocab_size - 1}")


def check_scoring(num_tokens: int, scoring: PromptScoring) -> None:
    """Raises EngineRefused for tokens that can't be scored: nothing predicts the first, none comes after the last."""
    if not 1 <= scoring.start < num_tokens:
        raise EngineRefused(f"of {num_tokens} tokens those from {scoring.start} on can't be scored")
