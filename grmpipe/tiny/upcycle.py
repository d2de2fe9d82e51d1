"""A mixture of experts made from a dense tiny model, with experts that differ.

`python -m grmpipe.tiny.upcycle runs/mixture` makes one of tiny://policy.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.tiny.resolve import resolve_model


def upcycle(
    dense: str | Path,
    directory: str | Path,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    noise: float = 1.0,
    seed: int = 0,
) -> None:
    """Sparse upcycling (arXiv 2212.05055): each expert is the dense MLP with noise of `noise` standard deviations on
    each matrix, so that the choice of experts matters. Routers are new and random.

    dense: the directory of a Qwen3. Writes a Hugging Face directory in float32.
    """
    model = Qwen3ForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixture = Qwen3MoeForCausalLM(_config(model.config, num_experts, top_k))
        mixture.load_state_dict(_weights(model.state_dict(), mixture.state_dict(), noise))
    mixture.save_pretrained(directory)
    PreTrainedTokenizerFast.from_pretrained(dense).save_pretrained(directory, save_jinja_files=False)


def _config(dense: Qwen3Config, num_experts: int, top_k: int) -> Qwen3MoeConfig:
    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "rope_parameters",
        "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return Qwen3MoeConfig(
        **{name: getattr(dense, name) for name in kept},
        moe_intermediate_size=dense.intermediate_size,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
    )


def _weights(dense: dict[str, Tensor], mixture: dict[str, Tensor], noise: float) -> dict[str, Tensor]:
    """The weights of the mixture; its routers, which the dense model lacks, stay."""
    made = {}
    for name, tensor in mixture.items():
        mlp, _, part = name.partition("experts.")
        if part == "gate_up_proj":
            made[name] = _experts(
                torch.cat([dense[f"{mlp}{half}_proj.weight"] for half in ("gate", "up")]), tensor, noise
            )
        elif part == "down_proj":
            made[name] = _experts(dense[f"{mlp}down_proj.weight"], tensor, noise)
        else:
            made[name] = dense.get(name, tensor)
    return made


def _experts(matrix: Tensor, like: Tensor, noise: float) -> Tensor:
    return matrix + noise * matrix.std() * torch.randn(like.shape)


if __name__ == "__main__":
    upcycle(resolve_model("tiny://policy"), sys.argv[1])
