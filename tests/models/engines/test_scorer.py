"""A scorer returns the head's number at the last token, independent of the rest of the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

from grmpipe.models.engines.scorer import ScalarScorer, ScorerSpec, batches


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scalar")
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, num_labels=1,
    )  # fmt: skip
    Qwen3ForTokenClassification(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("max_batch_tokens", [1, 9, 1000])
def test_scores_are_those_of_each_sequence_by_itself_and_in_order(path: Path, max_batch_tokens: int) -> None:
    sequences = [(1, 2, 3, 4, 5), (6,), (7, 8, 9), (1, 2, 3, 4, 5, 6, 7, 8), (9, 9)]
    plain = Qwen3ForTokenClassification.from_pretrained(path).eval()
    alone = [plain(input_ids=torch.tensor([sequence])).logits[0, -1, 0].item() for sequence in sequences]
    scorer = ScalarScorer(ScorerSpec(path=str(path), max_batch_tokens=max_batch_tokens))
    assert scorer.scores(sequences) == pytest.approx(alone, abs=1e-5)
    assert scorer.scores([]) == []


SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "num_labels": 1,
    "initializer_range": 0.2,
}  # fmt: skip
CLASSIFIERS = {
    "qwen3": lambda **more: Qwen3ForSequenceClassification(Qwen3Config(**SIZES, **more)),
    "llama": lambda **more: LlamaForSequenceClassification(LlamaConfig(**SIZES, **more)),
}


@pytest.mark.parametrize("pad_token_id", [0, None])
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_reward_model_scores_as_transformers_does_wherever_padding_stands(
    family: str, pad_token_id: int | None, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    CLASSIFIERS[family](pad_token_id=pad_token_id).save_pretrained(tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert 5e4 < sum(parameter.numel() for parameter in theirs.parameters()) < 5e5
    sequences = [(1, 2, 3, 4, 5), (6,), (7, 8, 9, 0, 0), (0, 0), (9, 3, 0, 4), (0, 5, 5, 0), (5, 7) * 30]
    expected = [theirs(input_ids=torch.tensor([sequence])).logits.item() for sequence in sequences]
    scores = ScalarScorer(ScorerSpec(path=str(tmp_path), max_batch_tokens=40)).scores(sequences)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert max(scores) - min(scores) > 0.1


def test_batches_hold_each_sequence_once_and_keep_to_their_tokens() -> None:
    lengths = [5, 1, 3, 20, 2, 5]
    found = list(batches(lengths, 8))
    assert sorted(index for batch in found for index in batch) == list(range(6))
    assert all(sum(lengths[index] for index in batch) <= 8 or batch == [3] for batch in found)
    assert len(found) < 6


@pytest.mark.gpu
def test_a_gpu_in_bfloat16_agrees_with_the_cpu(path: Path) -> None:
    sequences = [tuple(range(1, 40)), (5, 4, 3), tuple(range(20, 60))]
    here, there = (
        ScalarScorer(ScorerSpec(path=str(path), dtype=dtype, device=device))
        for dtype, device in (("float32", "cpu"), ("bfloat16", "cuda"))
    )
    assert there.scores(sequences) == pytest.approx(here.scores(sequences), abs=0.02)
