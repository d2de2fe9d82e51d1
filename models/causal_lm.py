"""Causal language models: loading one, and log-probs of packed samples. Never generates."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.hub import is_hub_name
from models.logprobs import chosen_logprobs

PACKED_ATTENTION = "packed_sdpa"
HeadKind = type[AutoModelForCausalLM] | type[AutoModelForTokenClassification]
ONE_LOAD_AT_A_TIME = threading.Lock()  # from_pretrained sets the process-wide default device and dtype meanwhile


def load_causal_lm(path: str, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The model in a Hugging Face directory (or of a hub name), in eval mode. Raises ValueError for anything else."""
    return loaded(AutoModelForCausalLM, path, read_config(path), dtype, device)


def outline_causal_lm(path: str, dtype: str = "float32") -> PreTrainedModel:
    """The same model without its numbers, on the meta device: to be sharded first and filled then."""
    return outlined(AutoModelForCausalLM, read_config(path), dtype)


def loaded(kind: HeadKind, path: str, config: PreTrainedConfig, dtype: str, device: str) -> PreTrainedModel:
    """A model of this kind with packed attention, in eval mode. Raises ValueError for weights that can't be read."""
    transformers.utils.logging.disable_progress_bar()
    try:
        with ONE_LOAD_AT_A_TIME:
            model = kind.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=PACKED_ATTENTION,
                local_files_only=Path(path).is_dir(),
            )
    except OSError as error:
        raise ValueError(f"path: the weights in {path!r} can't be loaded: {error}") from error
    nn.Module.to(model, device)
    return model.eval()


def outlined(kind: HeadKind, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """As `loaded`, without numbers and on the meta device."""
    with ONE_LOAD_AT_A_TIME, torch.device("meta"):
        model = kind.from_config(config, dtype=getattr(torch, dtype), attn_implementation=PACKED_ATTENTION)
    return model.eval()


def read_config(path: str) -> PreTrainedConfig:
    """Of a family that has causal language models. Raises ValueError for anything else."""
    local = Path(path).is_dir()
    # Anything else would be looked up on the hub, with retries that take most of a minute.
    if not local and not is_hub_name(path):
        raise ValueError(f"path: no directory {path!r}; give a Hugging Face directory (config.json, *.safetensors)")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=local)
    except OSError as error:
        raise ValueError(f"path: {path!r} holds no model: {error}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"path: {path!r} holds a {config.model_type!r} model, which is no causal language model")
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where each packed token stands. S: samples, L: longest sample, T: packed tokens."""

    num_samples: int
    max_length: int
    starts_S1: Tensor  # int32, S + 1 cumulative lengths, from 0
    slots_T: Tensor  # int64, sample * max_length + position: the token's place in a padded [S, L] batch

    @staticmethod
    def of(sample_lengths_S: Tensor) -> Packing:
        num_samples, max_length = len(sample_lengths_S), int(sample_lengths_S.max())
        starts_S1 = F.pad(sample_lengths_S.cumsum(0), (1, 0))
        samples = torch.arange(num_samples, device=sample_lengths_S.device)
        sample_T = samples.repeat_interleave(sample_lengths_S)
        position_T = torch.arange(len(sample_T), device=sample_T.device) - starts_S1[sample_T]
        return Packing(
            num_samples=num_samples,
            max_length=max_length,
            starts_S1=starts_S1.int(),
            slots_T=sample_T * max_length + position_T,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLogprobs:
    """Entry t is the log-prob of token t given what precedes it in its own sample, and the entropy of that draw.

    0 at the first token of each sample, and wherever `wanted_T` said no.
    """

    logprobs_T: Tensor
    entropy_T: Tensor  # zeros unless asked for


def packed_logprobs(
    model: nn.Module,
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    sample_lengths_S: Tensor,
    want_entropy: bool = False,
    entropy_gradient: bool = True,
    wanted_T: Tensor | None = None,
    temperature: float = 1.0,
) -> PackedLogprobs:
    """One forward pass over samples packed end to end, without padding in the linear layers. T: tokens, S: samples.

    `wanted_T` (bool) names the tokens that matter: only theirs pass through the output head. Works under autograd,
    FSDP2 and activation checkpointing: the root module is called once, everywhere.
    """
    not_first_T = position_ids_T > 0
    targets_R = (not_first_T if wanted_T is None else not_first_T & wanted_T).nonzero().squeeze(-1)
    logits_RV = packed_logits(model, token_ids_T, position_ids_T, sample_lengths_S, logits_to_keep=targets_R - 1)
    if temperature != 1.0:
        logits_RV = logits_RV / temperature
    logprobs_R, entropy_R = chosen_logprobs(logits_RV, token_ids_T[targets_R], want_entropy, entropy_gradient)
    zeros_T = logprobs_R.new_zeros(len(token_ids_T))
    return PackedLogprobs(
        logprobs_T=zeros_T.index_copy(0, targets_R, logprobs_R),
        entropy_T=zeros_T.index_copy(0, targets_R, entropy_R),
    )


def packed_logits(
    model: nn.Module, token_ids_T: Tensor, position_ids_T: Tensor, sample_lengths_S: Tensor, **options: Tensor
) -> Tensor:
    """[T, ..]: what the head gives at each token, or at those that the `options` of the model's forward pass keep."""
    return model(
        input_ids=token_ids_T[None],
        position_ids=position_ids_T[None],
        # A mask of four dimensions is taken as prepared: no T x T mask gets built. Packed attention needs none.
        attention_mask=token_ids_T.new_empty((1, 1, 1, 1)),
        use_cache=False,
        packing=Packing.of(sample_lengths_S),
        **options,
    ).logits[0]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample, as transformers calls it: [1, H, T, D] in, [1, T, H, D] out.

    Without a `packing` this is transformers' own SDPA, so that the model still works as any other.
    """
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for unsupported in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"path: packed attention has no {unsupported}, which {type(module).__name__} needs")
    query_THD, key_TGD, value_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    varlen = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    attend = _varlen if varlen else _padded
    return attend(query_THD, key_TGD, value_TGD, packing, scaling, sliding_window)[None], None


def _varlen(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """Flash attention over the packed tokens as they lie. H: query heads, G: key heads."""
    out = varlen_attn(
        query_THD.contiguous(),
        key_TGD.contiguous(),
        value_TGD.contiguous(),
        packing.starts_S1,
        packing.starts_S1,
        packing.max_length,
        packing.max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _padded(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """SDPA on a padded copy. Padding comes after a sample's last token, where a causal mask hides it."""
    rows, length = packing.num_samples, packing.max_length

    def pad(x_THD: Tensor) -> Tensor:
        padded = x_THD.new_zeros(rows * length, *x_THD.shape[1:]).index_copy(0, packing.slots_T, x_THD)
        return padded.view(rows, length, *x_THD.shape[1:]).transpose(1, 2)

    band_LL = None
    if window is not None and window < length:
        band_LL = torch.ones(length, length, dtype=torch.bool, device=query_THD.device).tril().triu(1 - window)
    out_SHLD = F.scaled_dot_product_attention(
        pad(query_THD),
        pad(key_TGD),
        pad(value_TGD),
        attn_mask=band_LL,
        is_causal=band_LL is None,
        scale=scaling,
        enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
    )
    return out_SHLD.transpose(1, 2).reshape(rows * length, *query_THD.shape[1:])[packing.slots_T]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
