"""The meta-RM as a vote sees it: for each judgement the probability that it is right."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from grmpipe.algorithm.advantages import sigmoid
from grmpipe.models.types import EngineRefused, Scorer
from grmpipe.types import Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRm:
    """Scores judgements, each together with the prompt that the GRM was shown, in the GRM's tokens: how likely it is
    right (SPCT, arXiv 2504.02495).

    context_tokens: the context window of the model behind `scorer`.
    """

    scorer: Scorer
    context_tokens: int

    async def scores(self, judgements: Sequence[Judgement], priority: int = 0) -> Sequence[float]:
        """One probability per judgement, in their order; the lowest priority goes first. Raises EngineRefused if a
        judgement exceeds the window or gets no finite score, EngineDied if the engine is dead: the verdict then fails
        with that cause.
        """
        sequences = list(map(join_token_ids, judgements))
        longest = max(map(len, sequences), default=0)
        if longest > self.context_tokens:
            raise EngineRefused(
                f"a judgement of {longest} tokens; the context window of meta has {self.context_tokens}"
            )
        logits = await asyncio.gather(*(self.scorer.score(sequence, priority) for sequence in sequences))
        if not all(map(math.isfinite, logits)):
            raise EngineRefused("meta gave a score that isn't finite: check its weights and meta_rm.dtype")
        return [sigmoid(logit) for logit in logits]


def join_token_ids(judgement: Judgement) -> tuple[int, ...]:
    """The tokens that the meta-RM reads: the GRM's prompt, then what it sampled."""
    return judgement.prompt_ids + judgement.completion.token_ids
