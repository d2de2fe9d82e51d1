"""What layers keep from forward to backward: activation checkpointing, and its offload to the host."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import varlen  # noqa: F401  registers its operator
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grmpipe.models.settings import Activations

# The operators of attention: the only ones of a layer whose cost grows with the square of a sample's length.
ATTENTION = [
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def checkpoint_layers(
    model: PreTrainedModel, layers: Sequence[GradientCheckpointingLayer], activations: Activations
) -> None:
    """Have these layers of the model keep what `activations` says, in place."""
    for layer in layers:
        # transformers recomputes only in training mode. The flag is set only on the block: dropout below it stays off.
        layer.training = activations.recomputes
    if not activations.recomputes:
        return
    options: dict[str, object] = {"use_reentrant": False}
    if activations.checkpointing == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, ATTENTION)
    model.gradient_checkpointing_enable(options)
    if activations.offload:
        run = functools.partial(_with_inputs_on_host, functools.partial(checkpoint, **options))  # type: ignore[arg-type]
        for layer in layers:
            layer._gradient_checkpointing_func = run  # type: ignore[assignment]  # as transformers sets it


def _with_inputs_on_host(run: Callable[..., object], layer: Callable[..., object], *inputs: object) -> object:
    """A checkpointed layer whose inputs wait in pinned host memory; on a CPU they are copied.

    Both copies run on the stream of the computation: 2 x inputs / bandwidth of the bus is added to each pass.
    """
    with save_on_cpu(pin_memory=True):
        return run(layer, *inputs)
