"""Migration of a completion from one engine to another: the request to the second, and the joined result. Pure.

The sampled tokens become the end of the next prompt: the model continues where it was, at the cost of a prefill. Every
token keeps its log-prob and the version that sampled it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.types import Completion, SamplingParams
from models.version_spans import join_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What a migration needs of a role's model.

    decode:     token ids to text, as its engines do it.
    seed_after: (seed, tokens sampled so far) -> the seed of the rest. An engine whose random numbers depend on the
                position keeps the seed, and samples what it would have sampled unmoved; any other would repeat its
                first random numbers.
    """

    decode: Callable[[Sequence[int]], str]
    seed_after: Callable[[int, int], int]

    def rest(self, params: SamplingParams, num_sampled: int) -> SamplingParams:
        """The parameters for the rest of the tokens."""
        seed = self.seed_after(params.seed, num_sampled)
        return replace(params, max_new_tokens=params.max_new_tokens - num_sampled, seed=seed)

    def join(self, parts: Sequence[Completion]) -> Completion:
        """The parts as one completion; it ends as the last part did."""
        last = parts[-1].versions[-1]
        token_ids = tuple(token for part in parts for token in part.token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
            text=self.decode(token_ids),
            finish_reason=parts[-1].finish_reason,
            versions=join_spans(last.model, _stretches(parts), last.version),
            experts_TLK=_joined_experts(parts),
            cached_tokens=parts[0].cached_tokens,
            drafted_tokens=sum(part.drafted_tokens for part in parts),
            accepted_tokens=sum(part.accepted_tokens for part in parts),
        )


class PartialRequest:
    """A request and the tokens sampled so far: the request to the next engine."""

    def __init__(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.num_sampled = 0
        self.moved = False
        self._whole_params = params
        self._parts: list[Completion] = []

    def go_on(self, part: Completion, continuation: Continuation) -> None:
        """Add a part that an engine sampled."""
        self.moved = True
        if not part.token_ids:
            return
        self._parts.append(part)
        self.prompt_ids += part.token_ids
        self.num_sampled += len(part.token_ids)
        self.params = continuation.rest(self._whole_params, self.num_sampled)

    def whole(self, last: Completion, continuation: Continuation | None) -> Completion:
        """The whole completion, with the last part."""
        if not self._parts:
            return last
        assert continuation is not None
        return continuation.join((*self._parts, last))


def can_be_continued(params: SamplingParams) -> bool:
    """Whether a request can be split: not with a stop string, which may cross the border, or a grammar, which would
    restart; nor one that scores its prompt, in a single pass.
    """
    return not params.stop and params.pattern is None and params.scoring is None


def _stretches(parts: Sequence[Completion]) -> Iterator[tuple[int, int, int]]:
    """(version, start, end) of the spans of all parts, in the whole completion."""
    offset = 0
    for part in parts:
        for span in part.versions:
            yield span.version, span.start + offset, span.end + offset
        offset += len(part.token_ids)


def _joined_experts(parts: Sequence[Completion]) -> np.ndarray | None:
    """The joined experts. Each part begins with the tokens of those before it: each token keeps its first experts."""
    joined: np.ndarray | None = None
    for part in parts:
        if part.experts_TLK is None:
            return None
        joined = part.experts_TLK if joined is None else np.concatenate([joined, part.experts_TLK[len(joined) :]])
    return joined
