"""Migration of a completion from one engine to another: the request to the second, and the joined result. Pure.

The sampled tokens become the end of the next prompt: the model continues where it was, at the cost of a prefill. Every
token keeps its log-prob and the version that sampled it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grmpipe.models.types import Completion, SamplingParams
from grmpipe.models.version_spans import join_spans


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

    def join(self, pieces: Sequence[Completion]) -> Completion:
        """The pieces as one completion; it ends as the last piece did."""
        last = pieces[-1].versions[-1]
        token_ids = tuple(token for piece in pieces for token in piece.token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
            text=self.decode(token_ids),
            finish_reason=pieces[-1].finish_reason,
            versions=join_spans(last.model, _stretches(pieces), last.version),
            experts_TLK=_joined_experts(pieces),
            cached_tokens=pieces[0].cached_tokens,
            drafted_tokens=sum(piece.drafted_tokens for piece in pieces),
            accepted_tokens=sum(piece.accepted_tokens for piece in pieces),
        )


class PartialRequest:
    """A request and the tokens sampled so far: the request to the next engine."""

    def __init__(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.num_sampled = 0
        self.moved = False
        self._whole_params = params
        self._pieces: list[Completion] = []

    def go_on(self, piece: Completion, continuation: Continuation) -> None:
        """Add a piece that an engine sampled."""
        self.moved = True
        if not piece.token_ids:
            return
        self._pieces.append(piece)
        self.prompt_ids += piece.token_ids
        self.num_sampled += len(piece.token_ids)
        self.params = continuation.rest(self._whole_params, self.num_sampled)

    def whole(self, last: Completion, continuation: Continuation | None) -> Completion:
        """The whole completion, with the last piece."""
        if not self._pieces:
            return last
        assert continuation is not None
        return continuation.join((*self._pieces, last))


def can_be_continued(params: SamplingParams) -> bool:
    """Whether a request can be split: not with a stop string, which may cross the border, or a grammar, which would
    restart; nor one that scores its prompt, in a single pass.
    """
    return not params.stop and params.pattern is None and params.scoring is None


def _stretches(pieces: Sequence[Completion]) -> Iterator[tuple[int, int, int]]:
    """(version, start, end) of the spans of all pieces, in the whole completion."""
    offset = 0
    for piece in pieces:
        for span in piece.versions:
            yield span.version, span.start + offset, span.end + offset
        offset += len(piece.token_ids)


def _joined_experts(pieces: Sequence[Completion]) -> np.ndarray | None:
    """The joined experts. Each piece begins with the tokens of those before it: each token keeps its first experts."""
    joined: np.ndarray | None = None
    for piece in pieces:
        if piece.experts_TLK is None:
            return None
        joined = piece.experts_TLK if joined is None else np.concatenate([joined, piece.experts_TLK[len(joined) :]])
    return joined
