"""A real vLLM server gives a teacher's scores as our own scoring does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_server import serve_vllm

from grmpipe.models.engines.openai.openai_engine import PromptScorer
from grmpipe.models.lm.score import ScoredText, score_sequences
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import Completion, PromptScoring, RequestContext, make_scoring_params
from grmpipe.tiny.resolve import SHIPPED

pytestmark = [pytest.mark.vllm, pytest.mark.long]
MODEL = str(SHIPPED / "policy")
PROMPTS = [tuple(range(5 + number, 60 + 7 * number)) for number in range(4)]


def test_vllm_scores_prompts_as_our_own_engine_does(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().requires_grad_(False)

    async def asked(url: str, top_k: int) -> list[Completion]:
        scorer = PromptScorer("teacher", "teacher", OpenAIConfig(base_url=url, api_key_env=""))
        params = make_scoring_params(3, top_k)
        contexts = [RequestContext(request_id=str(place), group_id="", role="teacher") for place in range(len(PROMPTS))]
        try:
            return await asyncio.gather(
                *(scorer.generate(prompt, params, context) for prompt, context in zip(PROMPTS, contexts, strict=True))
            )
        finally:
            await scorer.close()

    with serve_vllm(tmp_path, MODEL, "--served-model-name teacher") as url:
        found = {top_k: asyncio.run(asked(url, top_k)) for top_k in (0, 8)}
    for top_k, completions in found.items():
        texts = [ScoredText(prompt, PromptScoring(start=3, top_k=top_k)) for prompt in PROMPTS]
        for completion, expected in zip(completions, score_sequences(model, texts), strict=True):
            assert completion.scores is not None
            np.testing.assert_allclose(completion.scores.logprobs_N, expected.logprobs_N, atol=1e-4)
            if top_k:
                assert completion.scores.top_logprobs_NK is not None and completion.scores.top_ids_NK is not None
                np.testing.assert_allclose(completion.scores.top_logprobs_NK, expected.top_logprobs_NK, atol=1e-4)
                assert (completion.scores.top_ids_NK == expected.top_ids_NK).mean() > 0.99
