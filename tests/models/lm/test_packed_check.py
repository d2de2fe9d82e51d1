"""Models that leak between packed samples are refused by their config, or by the probe; others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from grmpipe.models.lm.causal_lm import compute_packed_logprobs, load_causal_lm
from grmpipe.models.lm.packable_configs import is_known_to_pack
from grmpipe.models.lm.packed_check import check_trainable, probe_logprobs, probe_scores
from grmpipe.models.lm.scalar_head import start_scalar_head
from grmpipe.models.model_files import PLAIN_FAMILIES

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

WORKING = {
    "llama": TINY,
    "mistral": TINY | {"sliding_window": 4},
    "qwen2": TINY,
    "qwen3": TINY,
    "qwen3_moe": TINY | MIXTURE,
    "qwen2_moe": TINY | MIXTURE,
    "gemma3_text": TINY | WINDOWS,
    "olmo3": TINY | WINDOWS,
    "phi3": TINY,
    "glm4": TINY,
    "smollm3": TINY,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
REFUSED = {
    "qwen3_5_text": (TINY | DELTA, "linear_attention"),
    "qwen3_next": (TINY | MIXTURE | DELTA, "linear_attention"),
    "lfm2": (TINY | {"layer_types": ["conv", "full_attention"]}, "conv"),
    "granitemoehybrid": (TINY | {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]}, ""),
    "jamba": (TINY | {"attn_layer_period": 2, "attn_layer_offset": 1}, ""),
    "minimax": (TINY | {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "llama4_text": (TINY | {"attention_chunk_size": 4}, "chunk"),
    "deepseek_v32": ({"index_topk": 4, "num_hidden_layers": 2, "n_routed_experts": 4}, "indexed_attention"),
    "doge": (TINY | {"keep_window_size": 4}, "keep_window_size"),
    "gpt_oss": (TINY | {"num_local_experts": 4}, "attention implementation"),
    "gemma2": (TINY, "softcap"),
    "stablelm": (TINY, "don't pass the ends of packed samples"),
    "nemotron": (TINY, "don't pass the ends of packed samples"),
    "falcon": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, ""),
    "bert": (TINY, "causal"),
    "bart": ({"vocab_size": 64, "d_model": 32, "decoder_layers": 2}, ""),
}


def config_of(kind: str, options: dict[str, Any]) -> PreTrainedConfig:
    return CONFIG_MAPPING[kind](**options)


def saved(directory: Path, kind: str, options: dict[str, Any]) -> str:
    """With random weights, large enough for a leak to show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("kind", WORKING)
def test_families_of_full_and_sliding_attention_may_be_trained(tmp_path: Path, kind: str) -> None:
    config_of(kind, WORKING[kind]).save_pretrained(tmp_path)
    check_trainable(str(tmp_path))
    assert is_known_to_pack(str(tmp_path)) == (kind in PLAIN_FAMILIES)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_packed_samples_leak_through_is_refused_by_its_config(tmp_path: Path, kind: str) -> None:
    options, why = REFUSED[kind]
    config_of(kind, options).save_pretrained(tmp_path)
    assert not is_known_to_pack(str(tmp_path))
    with pytest.raises(ValueError, match=rf"^path: .*{why}.*Qwen3"):
        check_trainable(str(tmp_path))


@pytest.mark.parametrize("leak", [{"attention_chunk_size": 4}, {"layer_types": ["conv", "full_attention"]}])
def test_a_plain_family_is_looked_at_where_its_config_hides_keys(tmp_path: Path, leak: dict[str, Any]) -> None:
    values = TINY | {"model_type": "llama"}
    for told, known in ((values, True), (values | leak, False)):
        (tmp_path / "config.json").write_text(json.dumps(told))
        assert is_known_to_pack(str(tmp_path)) == known


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "qwen3_moe", "gpt2"])
def test_the_probe_passes_what_packing_keeps_apart(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, kind, WORKING[kind])
    for dtype in ("float32", "bfloat16"):
        with torch.no_grad():
            probe_logprobs(load_causal_lm(path, dtype), CPU, dtype)


def test_the_probe_is_three_short_passes(tmp_path: Path) -> None:
    model, lengths = load_causal_lm(saved(tmp_path, "qwen3", WORKING["qwen3"])), []
    model.register_forward_pre_hook(
        lambda _, args, options: lengths.append(options["input_ids"].numel()), with_kwargs=True
    )
    with torch.no_grad():
        probe_logprobs(model, CPU, "float32")
    assert len(lengths) == 3 and sum(lengths) < 64


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "minimax", "bert"])
def test_the_probe_finds_what_leaks_or_looks_ahead(tmp_path: Path, kind: str) -> None:
    options = {"num_local_experts": 4} if kind == "minimax" else {}
    model = load_causal_lm(saved(tmp_path, kind, REFUSED[kind][0] | options))
    for dtype in ("float32", "bfloat16"):
        with torch.no_grad(), pytest.raises(ValueError, match=r"^path: .* differently than alone: off by .* nats"):
            probe_logprobs(model, CPU, dtype)


def test_a_new_scalar_head_is_probed_by_what_it_reads(tmp_path: Path) -> None:
    with torch.no_grad():
        probe_scores(start_scalar_head(saved(tmp_path / "good", "qwen3", WORKING["qwen3"])), CPU, "float32")
        leaking = start_scalar_head(saved(tmp_path / "bad", "qwen3_next", REFUSED["qwen3_next"][0]))
        with pytest.raises(ValueError, match=r"^path: .* differently than alone"):
            probe_scores(leaking, CPU, "float32")


@pytest.mark.parametrize("kind", ["qwen2_moe", "phimoe"])
def test_undeclared_window_of_packed_attention_is_an_error(tmp_path: Path, kind: str) -> None:
    options = TINY | MIXTURE | {"sliding_window": 4, "num_local_experts": 4}
    if kind == "qwen2_moe":
        options |= {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    config_of(kind, options).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding_window"):
        check_trainable(str(tmp_path))
    model = load_causal_lm(saved(tmp_path, kind, options))
    ids = torch.arange(3, 9)
    with pytest.raises(ValueError, match="path: .* sliding_window"):
        compute_packed_logprobs(model, ids, torch.arange(6), torch.tensor([6]))


def test_attention_without_knowledge_of_packing_is_an_error(tmp_path: Path) -> None:
    model = load_causal_lm(saved(tmp_path, "stablelm", TINY))
    with pytest.raises(ValueError, match="path: StableLmAttention doesn't pass"):
        compute_packed_logprobs(model, torch.arange(3, 9), torch.arange(6), torch.tensor([6]))
