"""Scores of sequences that go through the model in several passes are those of one pass."""

import itertools

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from grmpipe.models.lm.score import ScoredText, score_in_passes, score_sequences
from grmpipe.models.types import PromptScoring

MODELS = {
    "qwen 3": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
        )
    ),
    "gpt 2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("top_k", [0, 3])
@torch.inference_mode()
def test_scores_in_passes_are_those_of_one_pass(name: str, top_k: int) -> None:
    """Sequences of several lengths, scored from several places: before, at and after the cuts; one of them nowhere."""
    torch.manual_seed(0)
    model: PreTrainedModel = MODELS[name]().eval()
    texts = [
        ScoredText(tuple(torch.randint(0, 64, (length,)).tolist()), PromptScoring(start=start, top_k=top_k))
        for length, start in ((40, 12), (21, 20), (33, 7), (8, 8))
    ]
    sizes = iter((20, 3, 61, 80, 1000))
    *passes, last = score_in_passes(model, texts, lambda: next(sizes))
    assert [one.num_tokens for one in passes] == [5 * 4, 1 * 4, 15 * 4] and last.num_tokens == 19 * 4
    assert [one.scores for one in passes] == [None] * 3 and last.scores is not None
    for (one, other), text in zip(
        itertools.zip_longest(last.scores, score_sequences(model, texts)), texts, strict=True
    ):
        assert one.logprobs_N == pytest.approx(other.logprobs_N, abs=1e-5)
        assert len(one.logprobs_N) == len(text.token_ids) - text.scoring.start
        if top_k:
            assert (one.top_ids_NK == other.top_ids_NK).all()
            assert one.top_logprobs_NK == pytest.approx(other.top_logprobs_NK, abs=1e-5)
