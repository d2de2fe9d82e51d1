"""Moments in 8 and 16 bits: how far they are from what was stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.train.compact_moments import BLOCK, code_values, from_8bit, num_blocks, to_8bit, to_bfloat16


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_code_has_256_rising_values_with_0_and_1(signed: bool) -> None:
    values = code_values(signed)
    assert len(set(values)) == 256 and list(values) == sorted(values)
    assert {0.0, 1.0} <= set(values) and (min(values) < -0.99) == signed


@settings(max_examples=20)
@given(length=st.integers(1, 2 * BLOCK), signed=st.booleans(), decades=st.floats(-12, 6), seed=st.integers(0, 99))
def test_8_bits_are_the_nearest_value_of_the_code(length: int, signed: bool, decades: float, seed: int) -> None:
    values = drawn(3, length, seed=seed) * 10.0**decades
    values = values if signed else values.square()
    codes, scale = to_8bit(values, signed)
    assert codes.shape == values.shape and codes.dtype == torch.uint8 and scale.shape == (3, num_blocks(length))
    largest = scale.repeat_interleave(BLOCK, dim=-1)[:, :length]
    nearest = (values / largest)[..., None].sub(torch.tensor(code_values(signed))).abs().amin(-1)
    assert ((from_8bit(codes, scale, signed) - values).abs() <= (nearest + 1e-6) * largest).all()


def test_blocks_dont_cross_rows() -> None:
    values = drawn(4, BLOCK + 44)
    codes, scale = to_8bit(values, True)
    for row in range(4):
        alone_codes, alone_scale = to_8bit(values[row : row + 1], True)
        assert torch.equal(codes[row], alone_codes[0]) and torch.equal(scale[row], alone_scale[0])


def test_a_small_second_moment_is_never_rounded_to_0_but_0_is_0() -> None:
    codes, scale = to_8bit(torch.tensor([[1.0, 1e-12, 0.0]]), False)
    stored = from_8bit(codes, scale, False)[0]
    assert stored[0] == 1.0 and 0 < stored[1] < 1e-6 and stored[2] == 0
    assert torch.equal(from_8bit(torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(1, 1), True), torch.zeros(1, 3))


def test_stochastic_rounding_keeps_the_mean_where_rounding_loses_it() -> None:
    values = torch.full((100_000,), 1.0 + 2**-11)  # a quarter of bfloat16's half step
    rounded = to_bfloat16(values, torch.Generator().manual_seed(0))
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7} and values.bfloat16().unique().tolist() == [1.0]
    assert rounded.double().mean().item() == pytest.approx(1.0 + 2**-11, abs=1e-4)
    exact = torch.tensor([0.0, -1.5, 3.0])
    assert torch.equal(to_bfloat16(exact, torch.Generator()).float(), exact)
