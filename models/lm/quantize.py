"""Rounds weights to few bits and back, in place: what a quantized sampler computes with."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

BITS = {"int8": 8, "int4": 4}
FP8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa; the largest number is 448


def quantize_matrices(model: PreTrainedModel, kind: str) -> None:
    """Quantize all matrices except the embedding and the output head, as quantized engines do."""
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    for parameter in model.parameters():
        if parameter.dim() >= 2 and id(parameter) not in ends:
            if kind == "fp8":
                quantize_rows_to_fp8(parameter)
            else:
                quantize_rows(parameter, BITS[kind])


@torch.no_grad()
def quantize_rows(weight: Tensor, bits: int) -> None:
    """Round to the nearest of 2^bits - 1 levels between -absmax and absmax of each output row ([.., out, in]).

    Doing it twice changes nothing, so weights that a push leaves out need no unrounded copy.
    """
    top = 2 ** (bits - 1) - 1
    scale = weight.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / top
    weight.copy_((weight.float() / scale).round().clamp(-top, top) * scale)


@torch.no_grad()
def quantize_rows_to_fp8(weight: Tensor) -> None:
    """Round to the nearest float8 (E4M3) after each output row ([.., out, in]) is scaled so that its largest is 448.

    The weights of vLLM's `fp8_per_channel`; activations, which it rounds too, stay as they are. Twice changes nothing.
    """
    scale = weight.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(FP8).max
    weight.copy_((weight.float() / scale).to(FP8).float() * scale)
