"""Log-probs of given tokens by a causal LM, with the most likely tokens in their places."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.settings import CHUNK_LOGITS
from models.types import PromptScoring, TokenScores


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A sequence to score."""

    token_ids: tuple[int, ...]
    scoring: PromptScoring


def score_sequences(model: PreTrainedModel, sequences: Sequence[ScoredText]) -> list[TokenScores]:
    """One forward pass over sequences, padded on the right: no token attends to what comes after it. At most
    CHUNK_LOGITS logits at a time are copied to float.
    """
    device = model.device
    longest = max(len(one.token_ids) for one in sequences)
    padded = [[*one.token_ids, *[one.token_ids[-1]] * (longest - len(one.token_ids))] for one in sequences]
    first = min(one.scoring.start for one in sequences) - 1  # the place that predicts the first scored token
    logits_NTV = model(
        input_ids=torch.tensor(padded, device=device), use_cache=False, logits_to_keep=longest - first
    ).logits
    return [
        _score(logits_TV[one.scoring.start - 1 - first : len(one.token_ids) - 1 - first], one)
        for logits_TV, one in zip(logits_NTV, sequences, strict=True)
    ]


def _score(logits_NV: Tensor, one: ScoredText) -> TokenScores:
    """logits_NV: at the places that predict its N scored tokens."""
    chosen_N = torch.tensor(one.token_ids[one.scoring.start :], device=logits_NV.device)
    top_k, chunk = one.scoring.top_k, max(1, CHUNK_LOGITS // logits_NV.shape[-1])
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
