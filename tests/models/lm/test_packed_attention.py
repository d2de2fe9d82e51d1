"""Attention within packed samples: flash attention equals padded SDPA, and no GPU holds all scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from varlen_reference import exact_varlen

from grmpipe.models.lm import packed_attention
from grmpipe.models.lm.packing import Packing, PaddedRows, Prefixes

H, G, D = 4, 2, 8


def without_groups(*args: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
    return exact_varlen(*args, scale=scale, window_size=window_size)


# Families: shared tokens, and the tokens of each sibling.
FAMILIES = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 20), min_size=1, max_size=3)), min_size=1, max_size=4
)


def packing_of(families: list[tuple[int, list[int]]]) -> Packing:
    """The packer's layout: the first of a family has the prefix among its own tokens."""
    lengths, parents, prefixes = [], [], []
    for shared, own in families:
        first = len(lengths)
        for number, length in enumerate(own):
            lengths.append(length + (shared if number == 0 else 0))
            parents.append(first)
            prefixes.append(shared if number > 0 else 0)
    return Packing(torch.tensor(lengths), Prefixes(parents_S=torch.tensor(parents), lengths_S=torch.tensor(prefixes)))


@st.composite
def trees(draw: st.DrawFn) -> Packing:
    """Each sample continues any token of any earlier one, or none."""
    lengths, parents, prefixes = [draw(st.integers(1, 9))], [0], [0]
    for place in range(1, draw(st.integers(2, 9))):
        parent = draw(st.integers(0, place - 1))
        seen = draw(st.integers(0, lengths[parent]))
        lengths.append(draw(st.integers(1, 20)))
        parents.append(parent if seen else place)
        prefixes.append(prefixes[parent] + seen if seen else 0)
    return Packing(torch.tensor(lengths), Prefixes(parents_S=torch.tensor(parents), lengths_S=torch.tensor(prefixes)))


@settings(max_examples=30)
@given(
    packing=FAMILIES.map(packing_of) | trees(),
    window=st.none() | st.integers(1, 12),
    scale=st.none() | st.just(0.3),
    kv_heads=st.sampled_from([1, G, H]),
    knows_groups=st.booleans(),  # torch 2.11 doesn't
)
def test_flash_over_packed_tokens_is_padded_attention(
    packing: Packing, window: int | None, scale: float | None, kv_heads: int, knows_groups: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    num_tokens = packing.num_tokens
    query, key, value = (
        torch.randn(num_tokens, heads, D, generator=draw, dtype=torch.float64) for heads in (H, kv_heads, kv_heads)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "varlen_attn", exact_varlen if knows_groups else without_groups)
        patch.setattr(packed_attention, "VARLEN_KNOWS_GROUPS", knows_groups)
        flash = packed_attention._varlen(query, key, value, packing, scale, window)
    padded = packed_attention._padded(query, key, value, packing, scale, window)
    torch.testing.assert_close(flash, padded, atol=1e-12, rtol=0)


# -- what float32 costs on a GPU ---------------------------------------------------------------------------------------

LARGEST_BYTES = 512 << 20  # of one result; the scores of this case alone are 2 GiB per layer


class Largest(TorchDispatchMode):
    """The size of the largest result of any operation."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self.num_bytes = max(self.num_bytes, one.numel() * one.element_size())
        return result


def fused_float32(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool = False, **options: Any) -> Tensor:
    """What torch's only fused kernel for float32 on CUDA accepts: with a mask or none, as many key heads as query
    heads.
    """
    assert not enable_gqa and query.shape[1] == key.shape[1] == value.shape[1], "the math kernel: whole scores"
    return torch.empty_like(query)


@pytest.mark.parametrize("shared", [True, False])
def test_float32_on_a_gpu_takes_a_fused_kernel_and_makes_nothing_as_large_as_the_scores(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """8 siblings of 1024 tokens after a prompt of 1024, 32 heads over 8: on tensors without memory, on a CPU, because
    torch without CUDA has no other index.
    """
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_float32)
    monkeypatch.setattr(packed_attention, "on_gpu", lambda states: True)
    with FakeTensorMode(), torch.no_grad(), Largest() as largest:
        queries_NQ = torch.empty(8, 1024, dtype=torch.int64)
        keys_NK = torch.empty(8, 2048, dtype=torch.int64) if shared else queries_NQ
        lengths_N = torch.empty(8, dtype=torch.int64) if shared else None
        rows = PaddedRows(queries_NQ=queries_NQ, keys_NK=keys_NK, prefix_lengths_N=lengths_N)
        packing = SimpleNamespace(rows=(rows,), slots_T=torch.empty(8192, dtype=torch.int64))
        query, key, value = (torch.empty(9216, heads, 128) for heads in (32, 8, 8))
        out = packed_attention._padded(query, key, value, packing, None, None)
    assert out.shape == (8192, 32, 128)
    assert 0 < largest.num_bytes < LARGEST_BYTES
