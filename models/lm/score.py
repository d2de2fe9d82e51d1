"""Log-probs of given tokens by a causal LM, with the most likely tokens in their places."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from grmpipe.models.settings import CHUNK_LOGITS
from grmpipe.models.types import PromptScoring, TokenScores


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A sequence to score."""

    token_ids: tuple[int, ...]
    scoring: PromptScoring


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPass:
    """What a forward pass gave. num_tokens: those that it took, padding included. scores: one per sequence, with
    the last pass.
    """

    num_tokens: int
    scores: list[TokenScores] | None = None


def score_sequences(model: PreTrainedModel, sequences: Sequence[ScoredText]) -> list[TokenScores]:
    """Score sequences in one forward pass."""
    (scored,) = score_in_passes(model, sequences, lambda: sys.maxsize)
    assert scored.scores is not None
    return scored.scores


def score_in_passes(
    model: PreTrainedModel, sequences: Sequence[ScoredText], pass_tokens: Callable[[], int]
) -> Iterator[ScoredPass]:
    """Score sequences, padded on the right: no token attends to what comes after it. At most CHUNK_LOGITS logits at a
    time are copied to float.

    Each forward pass takes the next tokens of all sequences, as many as `pass_tokens` says then, or one of each. If
    that isn't all, the model keeps their keys and values meanwhile: it must have full attention.
    """
    longest, shared = max(len(one.token_ids) for one in sequences), len(sequences)
    padded = [[*one.token_ids, *[one.token_ids[-1]] * (longest - len(one.token_ids))] for one in sequences]
    ids_NT = torch.tensor(padded, device=model.device)
    earliest = min(one.scoring.start for one in sequences) - 1  # the place that predicts the first scored token
    cache: DynamicCache | None = None
    found: list[list[TokenScores]] = [[] for _ in sequences]
    end = 0
    while end < longest:
        begin, end = end, min(longest, end + max(1, pass_tokens() // shared))
        if end < longest and cache is None:
            cache = DynamicCache(config=model.config)
        first = max(begin, earliest)
        logits_NTV = model(
            input_ids=ids_NT[:, begin:end],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=max(1, end - first),
        ).logits
        for logits_TV, one, scores in zip(logits_NTV, sequences, found, strict=True):
            start = max(first, one.scoring.start - 1)
            stop = max(start, min(end, len(one.token_ids) - 1))
            scores.append(
                _score(logits_TV[start - first : stop - first], one.token_ids[start + 1 : stop + 1], one.scoring.top_k)
            )
        scored = None if end < longest else [_join(scores) for scores in found]
        yield ScoredPass(num_tokens=(end - begin) * shared, scores=scored)


def _join(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of a sequence from those of its passes."""
    with_top = parts[0].top_ids_NK is not None
    return TokenScores(
        logprobs_N=np.concatenate([part.logprobs_N for part in parts]),
        top_ids_NK=np.concatenate([part.top_ids_NK for part in parts if part.top_ids_NK is not None])
        if with_top
        else None,
        top_logprobs_NK=np.concatenate([part.top_logprobs_NK for part in parts if part.top_logprobs_NK is not None])
        if with_top
        else None,
    )


def _score(logits_NV: Tensor, token_ids: Sequence[int], top_k: int) -> TokenScores:
    """logits_NV: at the places that predict these N tokens."""
    chosen_N = torch.tensor(token_ids, dtype=torch.long, device=logits_NV.device)
    chunk = max(1, CHUNK_LOGITS // logits_NV.shape[-1])
    logprobs: list[Tensor] = []
    top: list[tuple[Tensor, Tensor]] = []
    for some_CV, ids_C in zip(logits_NV.split(chunk), chosen_N.split(chunk), strict=True):
        log_p_CV = some_CV.float().log_softmax(dim=-1)
        logprobs.append(log_p_CV.gather(-1, ids_C[:, None])[:, 0])
        if top_k:
            values_CK, ids_CK = log_p_CV.topk(top_k, dim=-1)
            top.append((values_CK, ids_CK))
    return TokenScores(
        logprobs_N=_to_host(torch.cat(logprobs), np.float32),
        top_ids_NK=_to_host(torch.cat([ids for _, ids in top]), np.int32) if top_k else None,
        top_logprobs_NK=_to_host(torch.cat([values for values, _ in top]), np.float32) if top_k else None,
    )


def _to_host(values: Tensor, dtype: type[np.generic]) -> np.ndarray:
    return values.cpu().numpy().astype(dtype, copy=False)
