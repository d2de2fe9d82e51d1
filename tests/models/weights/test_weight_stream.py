"""Buckets hold each weight once, under its Hugging Face name, and don't change after they were taken."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from grmpipe.models.checksum import checksum
from grmpipe.models.types import InlineBytes, WeightBucket
from grmpipe.models.weights.checksums import tensor_checksums
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.transport_ends import num_bytes
from grmpipe.models.weights.weight_stream import WeightStream


def make_model(tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def posted(model: PreTrainedModel, dtype: str = "float32", bucket_bytes: int = 1000) -> list[WeightBucket]:
    stream, store = WeightStream(model, dtype, bucket_bytes), ObjectStore(dtype)
    return [store.post(index, stream.unshard_bucket(index)) for index in range(stream.num_buckets)]


def streamed(model: PreTrainedModel, dtype: str = "float32", bucket_bytes: int = 1000) -> dict[str, torch.Tensor]:
    """The tensors that a receiver in this process gets, by name, in the order sent."""
    tensors: dict[str, torch.Tensor] = {}
    for bucket in posted(model, dtype, bucket_bytes):
        with receive_tensors(bucket) as came:
            assert not tensors.keys() & {announced.name for announced, _ in came}
            tensors |= {announced.name: tensor for announced, tensor in came}
    return tensors


@pytest.mark.parametrize("tied", [True, False])
def test_another_model_takes_the_stream_and_says_the_same(tied: bool) -> None:
    model, other = make_model(tied), make_model(tied)
    torch.nn.init.normal_(other.model.embed_tokens.weight)
    state = streamed(model)
    assert ("lm_head.weight" in state) is not tied
    other.load_state_dict(state, strict=False)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=0, rtol=0)


def test_every_parameter_travels_once() -> None:
    model = make_model()
    assert list(streamed(model)) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 30])
def test_buckets_keep_to_their_size_unless_one_tensor_exceeds_it(bucket_bytes: int) -> None:
    for bucket in posted(make_model(), bucket_bytes=bucket_bytes):
        assert bucket.tensors
        assert sum(map(num_bytes, bucket.tensors)) <= bucket_bytes or len(bucket.tensors) == 1


def test_the_cast_is_torchs() -> None:
    model = make_model()
    first = streamed(model, "bfloat16")["model.embed_tokens.weight"]
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, model.model.embed_tokens.weight.to(torch.bfloat16))


def test_a_posted_bucket_is_not_changed_by_training() -> None:
    model = make_model()
    before = posted(model)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
        model.model.embed_tokens.weight.add_(1)
    for bucket in before:
        with receive_tensors(bucket) as came:
            assert compute_checksums(came) == {tensor.name: tensor.checksum for tensor in bucket.tensors}
    assert [bucket.tensors for bucket in posted(model)] != [bucket.tensors for bucket in before]


def test_the_checksum_is_xxh3_64_of_the_bytes() -> None:
    data = np.arange(10, dtype=np.uint8)
    assert checksum(data) == checksum(data.tobytes()) == xxhash.xxh3_64_hexdigest(bytes(range(10)))
    assert checksum(data[:0]) == checksum(b"") == xxhash.xxh3_64_hexdigest(b"")
    bf16 = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    odd = torch.arange(6.0).reshape(2, 3).T  # not contiguous: its elements count in logical order
    assert tensor_checksums([bf16, odd, torch.zeros(0, 3), torch.tensor(1.5)]) == [
        checksum(bytes.fromhex("803f00c0")),
        checksum(np.array([0, 3, 1, 4, 2, 5], dtype=np.float32)),
        checksum(b""),
        checksum(np.array([1.5], dtype=np.float32)),
    ]


def test_a_flipped_bit_shows_under_its_name() -> None:
    (bucket,) = posted(make_model(), bucket_bytes=1 << 30)
    assert isinstance(bucket.payload, InlineBytes)
    bucket.payload.data[3][7] ^= 1
    with receive_tensors(bucket) as came:
        sums = compute_checksums(came)
    assert [t.name for t in bucket.tensors if t.checksum != sums[t.name]] == [bucket.tensors[3].name]


def test_bytes_of_another_length_are_refused_by_name() -> None:
    (bucket,) = posted(make_model(), bucket_bytes=1 << 30)
    assert isinstance(bucket.payload, InlineBytes)
    data = list(bucket.payload.data)
    data[3] = data[3][4:]
    short = replace(bucket, payload=InlineBytes(data=tuple(data)))
    with pytest.raises(ValueError, match=re.escape(bucket.tensors[3].name)), receive_tensors(short):
        pass
