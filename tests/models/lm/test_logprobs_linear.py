"""Log-probs in chunks of the vocabulary, compared with those of whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grmpipe.models.lm.logprobs import (
    ALSO,
    ENTROPY,
    LOGPROB,
    Wanted,
    compute_chosen_logprobs,
    linear_logprobs,
    split_columns,
)
from grmpipe.models.settings import CHUNK_LOGITS

ROWS, HIDDEN, VOCABULARY = 7, 5, 23


def parts(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weights and bias of a head, which want gradients, and the chosen tokens."""
    random = torch.Generator().manual_seed(seed)
    shapes = (ROWS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)
    hidden, weight, bias = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes)
    chosen = torch.randint(0, VOCABULARY, (ROWS,), generator=random)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), chosen


def asked(chosen: Tensor, chunk_logits: int = 40, **options: Any) -> Wanted:
    return Wanted(chosen_R=chosen, chunk_logits=chunk_logits, **options)


@settings(max_examples=60)
@given(
    chunk_logits=st.integers(1, 2 * ROWS * VOCABULARY),
    temperature=st.sampled_from([1.0, 0.3, 1.7]),
    want_entropy=st.booleans(),
    entropy_gradient=st.booleans(),
    with_bias=st.booleans(),
    fp32_logits=st.booleans(),
    with_others=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_chunks_of_the_vocabulary_change_neither_values_nor_gradients(
    chunk_logits: int,
    temperature: float,
    want_entropy: bool,
    entropy_gradient: bool,
    with_bias: bool,
    fp32_logits: bool,
    with_others: bool,
    seed: int,
) -> None:
    wanted = Wanted(
        chosen_R=torch.empty(0),
        want_entropy=want_entropy,
        entropy_gradient=entropy_gradient,
        temperature=temperature,
        fp32_logits=fp32_logits,
        chunk_logits=chunk_logits,
    )

    def results(chunked: bool) -> list[Tensor | None]:
        hidden, weight, bias, chosen = parts(seed=seed)
        shift = bias if with_bias else None
        also = torch.stack([chosen, chosen.flip(0), (chosen + 1) % len(weight)], dim=1) if with_others else None
        if chunked:
            out = linear_logprobs(hidden, weight, shift, replace(wanted, chosen_R=chosen, also_RK=also))
        else:
            logits = torch.nn.functional.linear(hidden, weight, shift)
            out = compute_chosen_logprobs(
                logits, replace(wanted, chosen_R=chosen, also_RK=also, chunk_logits=CHUNK_LOGITS)
            )
        logprobs, entropy, others = out[:, LOGPROB], out[:, ENTROPY], out[:, ALSO:]
        weights = torch.arange(1.0, ROWS + 1, dtype=torch.float64)
        through = want_entropy and entropy_gradient
        (
            (logprobs * weights).sum()
            + (3 * (entropy * weights.flip(0)).sum() if through else 0.0)
            + 2 * (others * weights[:, None]).sum()
        ).backward()
        return [logprobs.detach(), entropy.detach(), others.detach(), hidden.grad, weight.grad, bias.grad]

    for ours, whole in zip(results(True), results(False), strict=True):
        torch.testing.assert_close(ours, whole)


def test_the_formula_of_the_gradient_is_that_of_differences() -> None:
    hidden, weight, bias, chosen = parts()
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_logprobs(
            h, w, b, asked(chosen, want_entropy=True, temperature=0.7, also_RK=chosen.flip(0)[:, None])
        ),
        (hidden, weight, bias),
    )


def test_an_entropy_without_gradient_adds_none() -> None:
    hidden, weight, _, chosen = parts()
    linear_logprobs(hidden, weight, None, asked(chosen, want_entropy=True, entropy_gradient=False))[
        :, ENTROPY
    ].sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()


def test_16bit_logits_are_rounded_as_those_of_a_head_and_exact_on_request() -> None:
    hidden, weight, _, chosen = parts(torch.bfloat16)
    whole = compute_chosen_logprobs(hidden @ weight.t(), Wanted(chosen_R=chosen))[:, LOGPROB]
    exact = compute_chosen_logprobs(hidden.double() @ weight.double().t(), Wanted(chosen_R=chosen))[:, LOGPROB].float()
    rounded = linear_logprobs(hidden, weight, None, asked(chosen))[:, LOGPROB]
    precise = linear_logprobs(hidden, weight, None, asked(chosen, fp32_logits=True))[:, LOGPROB]
    torch.testing.assert_close(rounded, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(precise, exact, atol=1e-5, rtol=1e-6)
    assert (rounded - exact).abs().max() > 1e-3


def test_the_gradient_of_16bit_hidden_states_is_summed_in_float32() -> None:
    """Many chunks, whose parts would be lost if each sum were rounded."""
    hidden, weight, _, chosen = parts(torch.bfloat16)
    linear_logprobs(hidden, weight, None, asked(chosen, fp32_logits=True, chunk_logits=ROWS)).sum().backward()
    many = hidden.grad
    hidden.grad = None
    linear_logprobs(hidden, weight, None, Wanted(chosen_R=chosen, fp32_logits=True)).sum().backward()
    torch.testing.assert_close(many, hidden.grad, atol=1e-3, rtol=1e-2)


class Largest(TorchDispatchMode):
    """The most values of a tensor that an operation makes."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.values = max(self.values, out.numel())
        return out


def test_logits_and_their_gradient_never_exist_as_a_whole() -> None:
    hidden, weight, _, chosen = parts()
    with Largest() as largest:
        linear_logprobs(hidden, weight, None, asked(chosen, want_entropy=True)).sum().backward()
    assert largest.values == VOCABULARY * HIDDEN < ROWS * VOCABULARY


@pytest.mark.parametrize("chunk_logits", [1, 40, 1 << 20])
def test_every_column_is_in_one_chunk(chunk_logits: int) -> None:
    chunks = list(split_columns(ROWS, VOCABULARY, chunk_logits))
    assert [column for start, stop in chunks for column in range(start, stop)] == list(range(VOCABULARY))
    assert max(stop - start for start, stop in chunks) <= max(1, -(-chunk_logits // ROWS))


def test_no_rows_leave_weights_without_a_change() -> None:
    _, weight, _, _ = parts()
    hidden = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    linear_logprobs(hidden, weight, None, asked(torch.zeros(0, dtype=torch.int64), want_entropy=True)).sum().backward()
    assert weight.grad is not None and not weight.grad.any()
