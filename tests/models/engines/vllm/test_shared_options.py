"""What two models must have in common to be served by one engine, and the options that serve both."""

from __future__ import annotations

import pytest

from grmpipe.models.engines.vllm.shared_options import different_options, different_shapes, read_shape, wider_options
from grmpipe.models.settings import VllmConfig
from grmpipe.tiny.resolve import resolve_model

SHAPE = {"model_type": "qwen3", "hidden_size": 96, "rope_parameters": {"rope_theta": 1e4}, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"eos_token_id": 7, "dtype": "bfloat16", "_name_or_path": "elsewhere"}, []),
        ({"hidden_size": 128}, ["hidden_size (96, 128)"]),
        ({"rope_parameters": {"rope_theta": 1e6}}, ["rope_parameters.rope_theta (10000.0, 1000000.0)"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config.bits (None, 4)"]),
        ({"model_type": "llama", "hidden_size": 1}, ["hidden_size (96, 1)", "model_type (qwen3, llama)"]),
    ],
)
def test_shapes_that_an_engine_is_compiled_for_are_compared_and_named(
    change: dict[str, object], told: list[str]
) -> None:
    assert different_shapes(SHAPE, SHAPE | change) == told


def test_the_tiny_policy_and_the_tiny_grm_differ_in_their_weights_alone() -> None:
    paths = [resolve_model(f"tiny://{name}") for name in ("policy", "grm")]
    assert different_shapes(*map(read_shape, paths)) == []


def test_one_engine_gets_the_wider_options_and_never_sleeps() -> None:
    policy = VllmConfig(max_batch_rows=64, max_context_tokens=4096, kv_cache_mb=0, sleep_mode=True)
    grm = VllmConfig(max_batch_rows=256, max_context_tokens=16384, kv_cache_mb=512, gpu_memory_utilization=0.9)
    assert wider_options(policy, grm) == wider_options(grm, policy)
    assert wider_options(policy, grm) == VllmConfig(
        max_batch_rows=256, max_context_tokens=16384, kv_cache_mb=0, gpu_memory_utilization=0.9
    )
    assert wider_options(policy, VllmConfig()).max_context_tokens == 0, "the whole window is the wider one"


def test_options_of_which_no_value_serves_both_are_named() -> None:
    one = VllmConfig(prefix_caching=False, options={"quantization": "fp8"}, sleep_mode=True)
    assert different_options(one, VllmConfig(max_batch_rows=8)) == [
        "prefix_caching (False, True)",
        "options ({'quantization': 'fp8'}, {})",
    ]
    assert different_options(one, one) == []
