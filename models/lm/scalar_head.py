"""A language model's trunk with a head of one number: per token (a critic), or at the last one (a reward model).

Its files are those of Hugging Face's token or sequence classification with one label. Never generates.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from grmpipe.models.lm.causal_lm import compute_packed_logits, load_causal_lm, load_model, make_on_meta, read_config
from grmpipe.models.lm.packing import Packing
from grmpipe.models.lm.parallel.context_parallel import ContextRanks

HEAD = "score"
# A sequence classifier has the same trunk and the same head except for a bias, and reads it at the last token.
PER_TOKEN, PER_SEQUENCE = "ForTokenClassification", "ForSequenceClassification"


def load_scalar_head(path: str, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """Load the model of a directory that has a scalar head, in eval mode. The head computes in float32 for any
    `dtype`.
    """
    return finish_model(load_model(AutoModelForTokenClassification, path, scalar_config(path), dtype, device), path)


def start_scalar_head(path: str, dtype: str = "float32") -> PreTrainedModel:
    """A model to train: that of a directory with a scalar head, or the trunk of a causal language model with a new
    head.

    A new head is all zeros: it always gives 0, a probability of one half.
    """
    if has_head(read_config(path)):
        return load_scalar_head(path, dtype)
    model = outline_scalar_head(path, dtype)
    setattr(model, model.base_model_prefix, load_causal_lm(path, dtype).base_model)
    head = find_head(model, path).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return model


def outline_scalar_head(path: str, dtype: str = "float32") -> PreTrainedModel:
    """The result of `start_scalar_head` without its numbers, on the meta device."""
    config = read_config(path)
    config = scalar_config(path) if has_head(config) else with_one_label(config, path)
    return finish_model(make_on_meta(AutoModelForTokenClassification, config, dtype), path)


def scalar_config(path: str) -> PreTrainedConfig:
    """The config of a model with a head of one number. Raises ValueError for any other. Reads no weights."""
    config = read_config(path)
    kind = (config.architectures or ["a model without architectures"])[0]
    if not has_head(config):
        raise ValueError(
            f"path: {path!r} holds {kind}, which has no scalar head; give the directory `meta_rm` of a run of "
            "+experiment=train_meta_rm, or any model for token or sequence classification with one label"
        )
    if config.num_labels != 1:
        raise ValueError(
            f"path: the head of {path!r} ({kind}) has {config.num_labels} outputs, and a scalar head has one "
            "(num_labels in config.json); give a model with one label"
        )
    check_family(config, path)
    config.token_classification_bias = kind.endswith(PER_TOKEN)
    return config


def has_head(config: PreTrainedConfig) -> bool:
    """Whether the directory has a classifier, with any number of labels."""
    return any(name.endswith((PER_TOKEN, PER_SEQUENCE)) for name in config.architectures or ())


def check_family(config: PreTrainedConfig, path: str) -> None:
    """Raises ValueError if no class of the model's family has a head that can be read at every token."""
    if config.model_type not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        raise ValueError(
            f"path: transformers has no scalar head for {config.model_type!r} models ({path!r}); give one of another "
            "family, such as Llama, Mistral, Qwen2 or Qwen3"
        )


def with_one_label(config: PreTrainedConfig, path: str) -> PreTrainedConfig:
    check_family(config, path)
    config = copy.deepcopy(config)
    config.num_labels = 1
    config.token_classification_bias = True
    return config


def find_head(model: nn.Module, path: str = "") -> nn.Linear:
    head = model.get_submodule(HEAD) if isinstance(model, GenericForTokenClassification) else None
    if not isinstance(head, nn.Linear):
        raise ValueError(f"path: {type(model).__name__} ({path!r}) has no head that reads only the trunk")
    return head


def finish_model(model: PreTrainedModel, path: str) -> PreTrainedModel:
    head = find_head(model, path)
    head.to(torch.promote_types(head.weight.dtype, torch.float32))  # bf16 can't separate values 1 % apart
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(head.weight.dtype),))
    head.register_forward_hook(lambda _, inputs, output: output.clone())  # FSDP2 warns of outputs that are views
    return model


def compute_packed_scores(
    model: nn.Module,
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    sample_lengths_S: Tensor,
    context: ContextRanks | None = None,
) -> Tensor:
    """The head's number at each token, given its sample up to there. [T]; T: packed tokens, S: samples.

    One forward pass over samples packed end to end, also under autograd, FSDP2 and activation checkpointing.
    The lengths are on the host. context: ranks that share samples, as in `compute_packed_logprobs`.
    """
    packing = Packing(sample_lengths_S, None, context, token_ids_T.device)
    scores = compute_packed_logits(model, token_ids_T, position_ids_T, packing)[:, 0]
    return scores if context is None else context.unite_slices(scores, packing.num_tokens)


def last_of_samples(values_T: Tensor, sample_lengths_S: Tensor) -> Tensor:
    """[S]: the value at each sample's last token."""
    return values_T[sample_lengths_S.cumsum(0) - 1]


def find_padding(config: PreTrainedConfig) -> int | None:
    """The token that a sequence classifier skips at the end of a sequence. None: the last token is read, whatever it
    is.
    """
    per_sequence = any(name.endswith(PER_SEQUENCE) for name in config.architectures or ())
    pad_id: int | None = config.get_text_config().pad_token_id
    return pad_id if per_sequence else None


def without_padding(token_ids: Sequence[int], pad_id: int | None) -> Sequence[int]:
    """The tokens up to the last one that isn't padding, where transformers' sequence classifiers read their head; of
    padding alone the first token.
    """
    length = len(token_ids)
    while length > 1 and token_ids[length - 1] == pad_id:
        length -= 1
    return token_ids[:length]
