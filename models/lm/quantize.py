"""Weights rounded to few bits and back, in place: what a quantised sampler computes with. Speeds nothing up."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

BITS = {"int8": 8, "int4": 4}


def quantize_matrices(model: PreTrainedModel, kind: str) -> None:
    """All matrices but the embedding and the output head, which quantised engines leave as they are."""
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    for parameter in model.parameters():
        if parameter.dim() >= 2 and id(parameter) not in ends:
            quantize_rows(parameter, BITS[kind])


@torch.no_grad()
def quantize_rows(weight: Tensor, bits: int) -> None:
    """Round to the nearest of 2^bits - 1 levels between -absmax and absmax of each output row ([.., out, in]).

    Done twice it changes nothing more: what a push leaves out needs no copy of its own.
    """
    top = 2 ** (bits - 1) - 1
    scale = weight.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / top
    weight.copy_((weight.float() / scale).round().clamp(-top, top) * scale)
