"""A real vLLM server gives the scores of our own scorer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from vllm_server import serve_vllm

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.openai.openai_engine import PoolingScorer
from grmpipe.models.engines.scorer import ScalarScorer, ScorerSpec
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import Message
from grmpipe.tiny.problems import make_problems
from grmpipe.tiny.resolve import SHIPPED

pytestmark = [pytest.mark.vllm, pytest.mark.long]
MODEL = str(SHIPPED / "reward_model")


def test_vllm_scores_as_our_own_scorer_does(tmp_path: Path) -> None:
    renderer = Renderer.load(MODEL)
    conversations = [
        renderer.render_whole((Message(role="user", content=problem.question), Message(role="assistant", content=text)))
        for problem in make_problems("held_out", 4, 5)
        for text in (str(problem.solution), "I don't know.")
    ]

    async def asked(url: str) -> list[float]:
        scorer = PoolingScorer("rm", OpenAIConfig(base_url=url, api_key_env=""))
        try:
            return await asyncio.gather(*map(scorer.score, conversations))
        finally:
            await scorer.close()

    ours = ScalarScorer(ScorerSpec(path=MODEL)).scores(conversations)
    with serve_vllm(tmp_path, MODEL, "--served-model-name rm --runner pooling") as url:
        assert asyncio.run(asked(url)) == pytest.approx(ours, abs=1e-4)
    assert max(ours) - min(ours) > 5
