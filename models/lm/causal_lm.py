"""Causal language models: loading, and log-probs of packed samples."""

import functools
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grmpipe.models.hub import is_hub_name
from grmpipe.models.lm.logprobs import ALSO, ENTROPY, LOGPROB, Wanted, compute_chosen_logprobs
from grmpipe.models.lm.output_head import OutputHead, find_output_head
from grmpipe.models.lm.packed_attention import PACKED_ATTENTION
from grmpipe.models.lm.packing import Packing, Prefixes
from grmpipe.models.lm.parallel.context_parallel import ContextRanks
from grmpipe.models.settings import CHUNK_LOGITS

HeadKind = type[AutoModelForCausalLM] | type[AutoModelForTokenClassification]
ONE_LOAD_AT_A_TIME = threading.Lock()  # from_pretrained temporarily sets the process-wide default device and dtype


def load_causal_lm(path: str, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The model in a Hugging Face directory (or of a hub name), in eval mode. Raises ValueError for anything else."""
    return load_model(AutoModelForCausalLM, path, read_config(path), dtype, device)


def outline_causal_lm(path: str, dtype: str = "float32") -> PreTrainedModel:
    """The same model without its numbers, on the meta device: first sharded, then filled."""
    return make_on_meta(AutoModelForCausalLM, read_config(path), dtype)


def load_model(kind: HeadKind, path: str, config: PreTrainedConfig, dtype: str, device: str) -> PreTrainedModel:
    """A model of this kind with packed attention, in eval mode. Raises ValueError for weights that can't be read."""
    transformers.utils.logging.disable_progress_bar()
    try:
        with ONE_LOAD_AT_A_TIME:
            model, found = kind.from_pretrained(  # type: ignore[misc]  # a pair with output_loading_info
                path,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=PACKED_ATTENTION,
                local_files_only=Path(path).is_dir(),
                output_loading_info=True,
            )
    except OSError as error:
        raise ValueError(f"path: the weights in {path!r} can't be loaded: {error}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"path: the weights in {path!r} have other shapes than its config.json says; give a "
            "directory with the weights' own config.json"
        ) from error
    if kind is AutoModelForCausalLM and (lacking := sorted(found["missing_keys"])):
        raise ValueError(
            f"path: the weights in {path!r} lack {len(lacking)} tensors of the model, such as {lacking[0]}, and would "
            "begin there at random; give a complete model"
        )
    nn.Module.to(model, device)
    find_output_head(model)
    model.eval()
    loaded: PreTrainedModel = model
    return loaded


def make_on_meta(kind: HeadKind, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """Like `load_model`, without numbers and on the meta device."""
    with ONE_LOAD_AT_A_TIME, torch.device("meta"):
        model: PreTrainedModel = kind.from_config(  # type: ignore[no-untyped-call]
            config, dtype=getattr(torch, dtype), attn_implementation=PACKED_ATTENTION
        )
    find_output_head(model)
    model.eval()
    return model


def read_config(path: str) -> PreTrainedConfig:
    """The config of a model whose family has causal language models. Raises ValueError for anything else."""
    local = Path(path).is_dir()
    # Anything else would be looked up on the hub, with retries of almost a minute.
    if not local and not is_hub_name(path):
        raise ValueError(f"path: no directory {path!r}; give a Hugging Face directory (config.json, *.safetensors)")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=local)
    except OSError as error:
        raise ValueError(f"path: {path!r} holds no model: {error}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"path: {path!r} holds a {config.model_type!r} model, which is not a causal language model")
    # Mixtures: a balancing loss that isn't trained here, and that no packed sample's mask fits.
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLogprobs:
    """Entry t: the log-prob of token t given the tokens before it in its sample, and the entropy of that distribution.

    0 at the first token of each sample without a prefix, and where `wanted_T` is False.

    also_TK: the log-probs of K other tokens in its place, if they were asked for.
    """

    logprobs_T: Tensor
    entropy_T: Tensor  # zeros unless requested
    also_TK: Tensor | None = None


def compute_packed_logprobs(
    model: nn.Module,
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    sample_lengths_S: Tensor,
    prefixes: Prefixes | None = None,
    *,
    want_entropy: bool = False,
    entropy_gradient: bool = True,
    wanted_T: Tensor | None = None,
    also_TK: Tensor | None = None,
    temperature: float = 1.0,
    fp32_logits: bool = False,
    context: ContextRanks | None = None,
) -> PackedLogprobs:
    """One forward pass over samples packed end to end, without padding in the linear layers. T: tokens, S: samples.

    The position ids of a sample with a prefix continue those of the prefix; its first token is predicted at the
    prefix's last token. `wanted_T` (bool): only these tokens pass through the output head. `also_TK`: ids whose
    log-probs in the place of each token are wanted too. `fp32_logits`: as in `linear_logprobs`. Works under autograd,
    FSDP2 and activation checkpointing: the root module is called once on every rank.

    Lengths, prefixes and `wanted_T` are on the host, the rest on the model's device: nothing waits for it before the
    model is called.

    context: ranks that give the same arguments and compute a slice of the tokens each. All get all log-probs. A rank's
    gradient passes through those of its own slice: summed over ranks, gradients of weights are those of one loss.
    """
    packing = Packing(sample_lengths_S, prefixes, context, token_ids_T.device)
    is_target_T = packing.before_T != torch.arange(packing.num_tokens)
    targets_R = (is_target_T if wanted_T is None else is_target_T & wanted_T).nonzero().squeeze(-1)
    before_R = packing.before_T[targets_R]
    if context is not None:
        is_own_R, before_R = context.own_places(before_R, packing.num_tokens)
        targets_R = targets_R[is_own_R]
    targets_R, before_R = packing.copy_to_device(targets_R, before_R)
    wanted = Wanted(
        chosen_R=token_ids_T[targets_R],
        also_RK=None if also_TK is None else also_TK[targets_R],
        want_entropy=want_entropy,
        entropy_gradient=entropy_gradient,
        temperature=temperature,
        fp32_logits=fp32_logits,
        chunk_logits=CHUNK_LOGITS,
    )
    columns_RC = _chosen(model, token_ids_T, position_ids_T, packing, before_R, wanted)
    columns_CT = columns_RC.new_zeros(columns_RC.shape[1], len(token_ids_T)).index_copy(1, targets_R, columns_RC.t())
    if context is not None:
        columns_CT = context.unite(columns_CT)
    return PackedLogprobs(
        logprobs_T=columns_CT[LOGPROB],
        entropy_T=columns_CT[ENTROPY],
        also_TK=None if also_TK is None else columns_CT[ALSO:].t(),
    )


def _chosen(
    model: nn.Module, token_ids_T: Tensor, position_ids_T: Tensor, packing: Packing, before_R: Tensor, wanted: Wanted
) -> Tensor:
    """Log-probs and entropies of the wanted tokens, in the columns of `compute_chosen_logprobs`."""
    forward = functools.partial(
        compute_packed_logits, model, token_ids_T, position_ids_T, packing, logits_to_keep=before_R
    )
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    # Few logits are cheaper to keep than to compute again.
    if isinstance(head, OutputHead) and (wanted.fp32_logits or len(before_R) * head.out_features > wanted.chunk_logits):
        with head.return_logprobs(wanted):
            columns_RC: Tensor = forward()
        return columns_RC
    return compute_chosen_logprobs(forward(), wanted)


def compute_packed_logits(
    model: nn.Module, token_ids_T: Tensor, position_ids_T: Tensor, packing: Packing, **options: Tensor
) -> Tensor:
    """The head's output at each token, or at those that the `options` of the model's forward pass keep. [T, ..]; of a
    rank's slice of the tokens if ranks share samples.
    """
    if packing.context is not None:
        token_ids_T, position_ids_T = (packing.context.own_slice(ids_T) for ids_T in (token_ids_T, position_ids_T))
    logits: Tensor = model(
        input_ids=token_ids_T[None],
        position_ids=position_ids_T[None],
        # A four-dimensional mask counts as prepared: no T x T mask is built. Packed attention needs none.
        attention_mask=token_ids_T.new_empty((1, 1, 1, 1)),
        use_cache=False,
        packing=packing,
        **options,
    ).logits[0]
    return logits
