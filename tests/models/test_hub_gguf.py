"""A GGUF file is a model's path: converted once, with its tokenizer, chat template and stop tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter, LlamaFileType, TokenType
from transformers import LlamaConfig, LlamaForCausalLM

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.hub import find_files
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.types import Message
from grmpipe.tiny.tokenizer import build_tokenizer

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=2,
)  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRMPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of queries and keys as llama.cpp has them: rotated pairs beside each other."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write(file: Path, model: LlamaForCausalLM, architecture: str = "llama") -> Path:
    tokenizer = build_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    words = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    words += [f"<unused{number}>" for number in range(CONFIG.vocab_size - len(words))]
    special = {token["content"] for token in state["added_tokens"]}
    writer = GGUFWriter(file, architecture)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.CONTROL if word in special else TokenType.NORMAL for word in words])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in model.state_dict().items():
        stem = name.removesuffix(".weight")
        heads = {"q_proj": CONFIG.num_attention_heads, "k_proj": CONFIG.num_key_value_heads}.get(stem.split(".")[-1])
        if stem in OUTSIDE:
            written = OUTSIDE[stem]
        else:
            _, _, layer, within = stem.split(".", 3)
            written = f"blk.{layer}.{NAMES[within]}"
        writer.add_tensor(f"{written}.weight", (interleaved(weight, heads) if heads else weight).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_is_converted_once_to_the_same_model(
    tmp_path: Path, model: LlamaForCausalLM, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "mine.gguf", model)
    directory = find_files(str(file), weights=True)
    assert Path(directory).parent == cache and "mine.gguf (ALL_F32, 0.0 GB) is converted to float16" in caplog.text
    loaded, ids = load_causal_lm(directory, "float32", "cpu"), torch.tensor([[5, 77, 130, 9]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=2e-3, rtol=1e-2)
    renderer = Renderer.load(directory)
    assert renderer.decode_special(renderer.render([Message(role="user", content="6 x 7")])) == (
        "<|im_start|>user\n6 x 7<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.stop_token_ids == (2,)
    caplog.clear()
    assert find_files(str(file), weights=False) == directory and not caplog.records
    assert [one.name for one in cache.iterdir()] == [Path(directory).name]


def test_a_gguf_file_that_cannot_be_read_is_refused_in_words(
    tmp_path: Path, model: LlamaForCausalLM, cache: Path
) -> None:
    whole = write(tmp_path / "whole.gguf", model).read_bytes()
    for name, content in {"cut": whole[:900], "cut_in_weights": whole[:-4000], "text": b"hello", "empty": b""}.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=rf"^path: .*{name}\.gguf' is no whole GGUF file .* fetch it again"):
            find_files(str(tmp_path / f"{name}.gguf"), weights=True)
    with pytest.raises(ValueError, match=r"^path: .* has the architecture rwkv7, which .* It reads .*llama") as told:
        find_files(str(write(tmp_path / "other.gguf", model, "rwkv7")), weights=True)
    assert "general" not in str(told.value) and "tokenizer" not in str(told.value), "they are sections of a file"
    assert not cache.exists()
