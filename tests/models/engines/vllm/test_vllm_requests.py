"""Experts that vLLM returns with the last piece of an answer, in our layout. vLLM needs a GPU for them."""

from __future__ import annotations

import numpy as np
import pytest

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm.options import VllmStart, check_vllm_options, make_arguments
from grmpipe.models.engines.vllm.vllm_requests import VllmSample, read_experts, read_top
from grmpipe.models.settings import VllmConfig


@pytest.mark.parametrize(("told", "carried"), [(np.uint8, np.uint8), (np.uint16, np.int16)])
def test_layers_without_experts_are_left_out(told: type, carried: type) -> None:
    """vLLM has a row for every layer of the model."""
    experts_TLK = np.arange(5 * 4 * 2).reshape(5, 4, 2).astype(told)
    found = read_experts(VllmSample(experts_TLK=experts_TLK), layers=(1, 3))
    assert found is not None and found.dtype == carried
    np.testing.assert_array_equal(found, experts_TLK[:, [1, 3]])


def test_an_answer_that_tells_none_has_none() -> None:
    assert read_experts(VllmSample(), layers=(0,)) is None


def test_each_sampled_token_is_followed_by_its_likely_ones() -> None:
    sampled = VllmSample(
        token_ids=[4, 5], likely_ids=[4, 4, 9, 5, 8, 5], likely_logprobs=[-0.5, -0.5, -1.5, -3.0, -0.25, -3.0]
    )
    top = read_top(sampled, 2)
    assert top is not None and top.ids_TK is not None
    assert top.ids_TK.tolist() == [[4, 4, 9], [5, 8, 5]]
    assert top.logprobs_TK.tolist() == [[-0.5, -0.5, -1.5], [-3.0, -0.25, -3.0]]
    assert read_top(sampled, 0) is None and read_top(VllmSample(), 2) is None


@pytest.mark.vllm
def test_the_last_piece_tells_all() -> None:
    from vllm import RequestOutput
    from vllm.outputs import CompletionOutput

    experts_TLK, sampled = np.ones((6, 2, 2), np.uint8), VllmSample()
    for token_ids, told in (([1], None), ([2, 3], experts_TLK)):
        piece = CompletionOutput(
            index=0, text="", token_ids=token_ids, cumulative_logprob=None, logprobs=None, routed_experts=told
        )
        sampled.add(
            RequestOutput(
                request_id="r", prompt=None, prompt_token_ids=[7] * 4, prompt_logprobs=None, outputs=[piece],
                finished=told is not None,
            )
        )  # fmt: skip
    assert sampled.token_ids == [1, 2, 3] and sampled.experts_TLK is experts_TLK


@pytest.mark.vllm
def test_vllm_is_asked_for_them_by_the_key_of_the_algorithm_alone() -> None:
    spec = EngineSpec(path="m", role="policy", device="cuda", return_routed_experts=True)
    start = VllmStart(spec=spec, config=VllmConfig(), context_tokens=128)
    assert make_arguments(start)["enable_return_routed_experts"] is True
    with pytest.raises(ValueError, match=r"enable_return_routed_experts: is set by algorithm\.router_replay"):
        check_vllm_options(VllmConfig(options={"enable_return_routed_experts": True}))
