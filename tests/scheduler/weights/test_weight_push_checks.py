"""The probe separates other weights from the noise of sixteen bits, however sharp the policy is."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grmpipe.scheduler.weights.weight_push import TOLERANCE_16BIT as TOLERANCE
from grmpipe.scheduler.weights.weight_push import WeightMismatch, check_probe, probe_bound, probe_error


def logprobs_of(seed: int, sharpness: float, dtype: torch.dtype) -> list[float]:
    """Log-probs of 63 random tokens under a random model whose logits have about this standard deviation."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    ids_T = torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness / (0.02 * math.sqrt(128)))
        logprobs_TV = model.to(dtype)(ids_T[None]).logits[0, :-1].float().log_softmax(-1)
    told: list[float] = logprobs_TV.gather(-1, ids_T[1:, None])[:, 0].tolist()
    return told


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0, 8.0])
def test_sixteen_bits_pass_and_other_weights_do_not(sharpness: float) -> None:
    learner = logprobs_of(0, sharpness, torch.float32)
    noise = check_probe("e", 1, learner, logprobs_of(0, sharpness, torch.bfloat16), TOLERANCE)
    for last_error in (None, noise):
        bound = probe_bound(TOLERANCE, last_error)
        assert 2 * noise < bound  # two implementations in 16 bits differ more than one from float32
        with pytest.raises(WeightMismatch, match="likelier tokens"):
            check_probe("e", 1, learner, logprobs_of(1, sharpness, torch.bfloat16), bound)


def test_few_unlikely_tokens_pass_the_check_and_a_nan_fails_it() -> None:
    expected = [-1.0, -0.5, -2.0, -1.5, -14.0, -16.0, -15.0, -17.0]
    scored = [logprob + (0.6 if logprob < -10 else 0.01) for logprob in expected]
    assert probe_error(expected, scored) == pytest.approx(0.01)
    assert math.isnan(probe_error(expected, [*scored[:-1], math.nan]))
    assert probe_error([-3.0], [-2.5]) == 0.5


def test_the_bound_follows_the_noise_within_the_tolerance() -> None:
    assert probe_bound(0.25, None) == 0.25
    assert probe_bound(0.25, 0.001) == 0.05
    assert probe_bound(0.25, 0.02) == pytest.approx(0.2)
    assert probe_bound(0.25, 0.2) == 0.25
    assert probe_bound(1e-3, 1e-6) == 1e-3
