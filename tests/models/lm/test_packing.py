"""A prefix that is packed once gives all its samples the same as a copy for each."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from grmpipe.models.lm.causal_lm import PackedLogprobs, compute_packed_logprobs, load_causal_lm
from grmpipe.models.lm.packing import Packing, Prefixes

# (shared tokens, tokens of each), by family. Many lengths, single samples, siblings of one token.
FAMILIES = [(5, [4, 1, 37, 4, 18]), (0, [9]), (40, [2, 2]), (0, [1]), (1, [1, 1, 20]), (12, [70, 3, 65])]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Float64 throughout, while Qwen3's norms round to float32."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(path)
    return load_causal_lm(str(path), "float64")


def qwen(path: Path, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            **{
                "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
                "tie_word_embeddings": True, **changes,
            }
        )
    ).save_pretrained(path)  # fmt: skip
    return load_causal_lm(str(path))


def drawn() -> list[tuple[Tensor, list[Tensor]]]:
    """Token ids of each family: the prefix, and the tokens of each sample after it."""
    draw = torch.Generator().manual_seed(1)
    ids = [(torch.randint(64, (shared,), generator=draw), own) for shared, own in FAMILIES]
    return [(prefix, [torch.randint(64, (length,), generator=draw) for length in own]) for prefix, own in ids]


def one_by_one(model: PreTrainedModel, **options: bool) -> PackedLogprobs:
    """Every sample with its own copy of the prefix; entries of prefixes are left out except for the first of a
    family.
    """
    samples = [torch.cat([prefix, own]) for prefix, owns in drawn() for own in owns]
    lengths_S = torch.tensor([len(ids) for ids in samples])
    positions_T = torch.cat([torch.arange(len(ids)) for ids in samples])
    every = compute_packed_logprobs(model, torch.cat(samples), positions_T, lengths_S, **options)
    kept_T = torch.cat(
        [
            torch.arange(len(prefix) + len(own)) >= (len(prefix) if place else 0)
            for prefix, owns in drawn()
            for place, own in enumerate(owns)
        ]
    )
    return PackedLogprobs(logprobs_T=every.logprobs_T[kept_T], entropy_T=every.entropy_T[kept_T])


def laid_out() -> tuple[Tensor, Tensor, Tensor, Prefixes]:
    """Ids, positions, own lengths and prefixes of all families, every prefix once."""
    ids, positions, lengths, parents, shared = [], [], [], [], []
    for prefix, owns in drawn():
        first = len(lengths)
        for place, own in enumerate(owns):
            before = len(prefix) if place else 0
            ids.append(own if place else torch.cat([prefix, own]))
            positions.append(before + torch.arange(len(ids[-1])))
            lengths.append(len(ids[-1]))
            parents.append(first)
            shared.append(before)
    prefixes = Prefixes(parents_S=torch.tensor(parents), lengths_S=torch.tensor(shared))
    return torch.cat(ids), torch.cat(positions), torch.tensor(lengths), prefixes


def once(model: PreTrainedModel, **options: bool) -> PackedLogprobs:
    return compute_packed_logprobs(model, *laid_out(), **options)


def test_log_probs_and_entropy_are_those_of_whole_samples(exact: PreTrainedModel) -> None:
    shared, alone = once(exact, want_entropy=True), one_by_one(exact, want_entropy=True)
    assert len(shared.logprobs_T) == len(alone.logprobs_T)
    torch.testing.assert_close(shared.logprobs_T, alone.logprobs_T, atol=1e-12, rtol=0)
    torch.testing.assert_close(shared.entropy_T, alone.entropy_T, atol=1e-12, rtol=0)


def test_gradients_are_those_of_whole_samples(exact: PreTrainedModel) -> None:
    """The gradients of a prefix are sums over its samples."""
    weights_T = torch.randn(len(laid_out()[0]), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights_T = weights_T * is_own_T()
    found = []
    for way in (once, one_by_one):
        exact.zero_grad()
        (way(exact).logprobs_T * weights_T).sum().backward()
        found.append([parameter.grad.clone() for parameter in exact.parameters()])
    for shared, alone in zip(*found, strict=True):
        torch.testing.assert_close(shared, alone, atol=1e-10, rtol=0)
    assert max(gradient.abs().max() for gradient in found[0]) > 1


def is_own_T() -> Tensor:
    """False on prefixes, which aren't trained."""
    return torch.cat(
        [
            torch.arange(len(own) if place else len(prefix) + len(own)) >= (0 if place else len(prefix))
            for prefix, owns in drawn()
            for place, own in enumerate(owns)
        ]
    )


def test_first_token_after_a_prefix_is_predicted_by_the_prefix_last_token(exact: PreTrainedModel) -> None:
    packing = Packing(*laid_out()[2:])
    starts = [0, *itertools.accumulate(laid_out()[2].tolist())][:-1]
    before = packing.before_T[torch.tensor(starts)].tolist()
    assert before[:5] == [0, 4, 4, 4, 4]
    assert before[5] == starts[5], "a lone sample has nothing before its first token"


@pytest.mark.parametrize("layers", [{}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}])
def test_packed_logprobs_match_with_rotary_positions_grouped_heads_and_sliding_windows(
    tmp_path: Path, layers: dict
) -> None:
    model = qwen(tmp_path, **layers)
    assert ("sliding_attention" in model.config.layer_types) == bool(layers)
    torch.testing.assert_close(once(model).logprobs_T, one_by_one(model).logprobs_T, atol=1e-5, rtol=0)


def test_layers_with_and_without_a_window_give_the_log_probs_of_single_samples(tmp_path: Path) -> None:
    model = qwen(tmp_path, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    torch.testing.assert_close(once(model).logprobs_T, one_by_one(model).logprobs_T, atol=1e-5, rtol=0)


def test_no_sample_sees_a_sibling(exact: PreTrainedModel) -> None:
    """Other tokens of the first sibling, which holds the prefix, don't change the others."""
    ids_T, positions_T, lengths_S, prefixes = laid_out()
    changed_T = ids_T.clone()
    changed_T[5:9] = (changed_T[5:9] + 1) % 64
    before = compute_packed_logprobs(exact, ids_T, positions_T, lengths_S, prefixes).logprobs_T
    after = compute_packed_logprobs(exact, changed_T, positions_T, lengths_S, prefixes).logprobs_T
    assert not torch.equal(before[5:9], after[5:9])
    torch.testing.assert_close(before[9:], after[9:], atol=1e-13, rtol=0)


def test_keys_lie_as_flash_attention_wants_them() -> None:
    """The CPU's keys by rows are the GPU's end to end: the prefix and the sample's own tokens."""
    ids_T, _, lengths_S, prefixes = laid_out()
    keys = Packing(lengths_S, prefixes).keys
    assert keys.places_K is not None
    samples = [torch.cat([prefix, own]) for prefix, owns in drawn() for own in owns]
    assert keys.starts_S1.tolist() == [0, *itertools.accumulate(len(ids) for ids in samples)]
    assert keys.max_length == max(map(len, samples))
    torch.testing.assert_close(ids_T[keys.places_K], torch.cat(samples))
    assert Packing(lengths_S).keys.places_K is None
    none = Prefixes(parents_S=torch.arange(2), lengths_S=torch.zeros(2, dtype=torch.int64))
    assert Packing(torch.tensor([3, 2]), none).keys.places_K is None, "prefixes without tokens copy no keys"


@pytest.mark.parametrize("shares", [True, False])
def test_what_attention_reads_is_copied_to_its_device_and_computed_on_the_host(shares: bool) -> None:
    """No number can be read on a device without memory."""
    meta = torch.device("meta")
    lengths_S, prefixes = laid_out()[2:]
    packing = Packing(lengths_S, prefixes if shares else None, device=meta)
    read = [packing.keys.places_K, packing.keys.starts_S1, packing.keys.query_starts_S1, packing.slots_T]
    for rows in packing.rows:
        read += [rows.queries_NQ, rows.keys_NK, rows.prefix_lengths_N]
    assert {tensor.device for tensor in read if tensor is not None} == {meta}
    assert packing.before_T.device.type == "cpu"


def test_rows_of_a_call_are_about_as_long() -> None:
    lengths_S = torch.tensor([1, 5, 16, 17, 32, 33, 64, 65, 128])
    sizes = [rows.queries_NQ.shape for rows in Packing(lengths_S).rows]
    assert sorted(sizes) == [(2, 32), (2, 64), (2, 128), (3, 16)]
