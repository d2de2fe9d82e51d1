"""Chunks change memory, not numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grmpipe.models.lm.logprobs import LOGPROB, Wanted, compute_chosen_logprobs


def logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(11, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


CHOSEN = torch.arange(11) % 6


def asked(logits: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of the chosen tokens, and the entropies."""
    logprobs, entropy = compute_chosen_logprobs(logits, Wanted(chosen_R=CHOSEN, **options)).unbind(1)
    return logprobs, entropy


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_chunks_change_neither_values_nor_gradients(entropy_gradient: bool) -> None:
    results = []
    for chunk_logits in (1, 4 * 6, 1 << 20):
        leaf = logits().requires_grad_()
        logprobs, entropy = asked(leaf, want_entropy=True, entropy_gradient=entropy_gradient, chunk_logits=chunk_logits)
        (of_entropy,) = torch.autograd.grad(entropy.sum(), leaf, retain_graph=True)
        assert bool(of_entropy.any()) is entropy_gradient
        (logprobs.sum() + entropy.sum()).backward()
        results.append((logprobs, entropy, leaf.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize("chunk_logits", [4 * 6, 1 << 20])
def test_a_temperature_divides_in_float32_and_copies_no_16bit_logits(chunk_logits: int) -> None:
    """As engines do. Gradients flow through it."""
    leaf = (20 * logits()).bfloat16().requires_grad_()
    logprobs, entropy = asked(leaf, want_entropy=True, chunk_logits=chunk_logits, temperature=0.7)
    log_softmax = (leaf.detach().double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), log_softmax[torch.arange(11), CHOSEN], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), -(log_softmax.exp() * log_softmax).sum(-1), atol=1e-3, rtol=1e-4)
    logprobs.sum().backward()
    one_hot = torch.nn.functional.one_hot(CHOSEN, 6)
    torch.testing.assert_close(leaf.grad.double(), (one_hot - log_softmax.exp()) / 0.7, atol=1e-2, rtol=1e-2)


def test_values_are_log_softmax_and_shannon_entropy() -> None:
    logprobs, entropy = asked(logits(), want_entropy=True)
    log_softmax = logits().log_softmax(-1)
    torch.testing.assert_close(logprobs, log_softmax[torch.arange(11), CHOSEN])
    torch.testing.assert_close(entropy, -(log_softmax.exp() * log_softmax).sum(-1))
    uniform = compute_chosen_logprobs(torch.zeros(1, 8), Wanted(chosen_R=torch.tensor([3]), want_entropy=True))
    assert uniform[0].tolist() == pytest.approx([-math.log(8), math.log(8)])


def test_low_precision_logits_are_summed_in_float32() -> None:
    logprobs, _ = asked(logits(torch.bfloat16))
    exact, _ = asked(logits(torch.bfloat16).double())
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-6, rtol=0)


def test_logprobs_of_no_rows_have_a_gradient() -> None:
    leaf = torch.zeros(0, 6, requires_grad=True)
    wanted = Wanted(chosen_R=torch.zeros(0, dtype=torch.int64), want_entropy=True)
    logprobs = compute_chosen_logprobs(leaf, wanted)[:, LOGPROB]
    logprobs.sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == (0, 6)
