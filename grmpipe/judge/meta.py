"""What a vote needs of a meta-RM: a number for each judgement. Only the contract; scores nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from grmpipe.types import Judgement, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedResponses:
    """A judgement, and what it is about. `responses` stand in the order shown, as the policy wrote them."""

    prompt: Prompt
    responses: tuple[str, ...]
    judgement: Judgement


class MetaScorer(Protocol):
    """Judges judgements: which of them are likely to be right (SPCT, arXiv 2504.02495)."""

    async def scores(self, judged: Sequence[JudgedResponses], priority: int = 0) -> Sequence[float]:
        """One probability, 0 to 1, for each, in their order. The lowest priority goes first.

        Raises EngineDied or EngineRefused: the verdict fails by that cause then.
        """
        ...
