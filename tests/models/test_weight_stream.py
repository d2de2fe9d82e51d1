"""Buckets hold each weight once, under its Hugging Face name, and don't change after they were taken."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from models.types import WeightTensor
from models.weight_stream import WeightStream, checksum, checksums


def make_model(tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def streamed(model: PreTrainedModel, dtype: str = "float32", bucket_bytes: int = 1000) -> list[WeightTensor]:
    stream = WeightStream(model, dtype, bucket_bytes)
    buckets = [stream.bucket(index) for index in range(stream.num_buckets)]
    return [tensor for bucket in buckets if bucket is not None for tensor in bucket.tensors]


@pytest.mark.parametrize("tied", [True, False])
def test_another_model_takes_the_stream_and_says_the_same(tied: bool) -> None:
    model, other = make_model(tied), make_model(tied)
    torch.nn.init.normal_(other.model.embed_tokens.weight)
    tensors = streamed(model)
    assert ("lm_head.weight" in {tensor.name for tensor in tensors}) is not tied
    state = {t.name: torch.from_numpy(t.data).view(torch.float32).reshape(t.shape) for t in tensors}
    other.load_state_dict(state, strict=False)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=0, rtol=0)


def test_every_parameter_travels_once() -> None:
    model = make_model()
    names = [tensor.name for tensor in streamed(model)]
    assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 30])
def test_buckets_keep_to_their_size_unless_one_tensor_exceeds_it(bucket_bytes: int) -> None:
    stream = WeightStream(make_model(), "float32", bucket_bytes)
    for index in range(stream.num_buckets):
        bucket = stream.bucket(index)
        assert bucket is not None and bucket.tensors
        assert sum(t.data.nbytes for t in bucket.tensors) <= bucket_bytes or len(bucket.tensors) == 1


def test_the_cast_is_torchs() -> None:
    model = make_model()
    first = streamed(model, "bfloat16")[0]
    assert first.dtype == "bfloat16" and first.data.nbytes == 2 * 64 * 16
    taken = torch.from_numpy(first.data).view(torch.bfloat16).reshape(first.shape)
    assert torch.equal(taken, model.model.embed_tokens.weight.to(torch.bfloat16))


def test_a_taken_bucket_is_not_changed_by_training() -> None:
    model = make_model()
    before = streamed(model)
    sums = [checksum(tensor.data) for tensor in before]
    with torch.no_grad():
        model.model.norm.weight.add_(1)
        model.model.embed_tokens.weight.add_(1)
    assert [checksum(tensor.data) for tensor in before] == sums
    assert [checksum(tensor.data) for tensor in streamed(model)] != sums


def test_who_does_not_keep_gets_nothing() -> None:
    assert WeightStream(make_model(), "float32", 1000).bucket(0, keep=False) is None


def test_the_checksum_is_blake2b_64_of_the_bytes() -> None:
    data = np.arange(10, dtype=np.uint8)
    assert checksum(data) == checksum(data.tobytes()) == hashlib.blake2b(bytes(range(10)), digest_size=8).hexdigest()


def test_a_flipped_bit_shows_under_its_name() -> None:
    bucket = WeightStream(make_model(), "float32", 1 << 30).bucket(0)
    assert bucket is not None
    before = checksums(bucket)
    bucket.tensors[3].data[7] ^= 1
    after = checksums(bucket)
    assert [name for name in before if before[name] != after[name]] == [bucket.tensors[3].name]
