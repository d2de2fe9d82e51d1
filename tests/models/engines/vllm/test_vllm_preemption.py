"""More prompts than one step of vLLM takes: on a CPU a seeded prompt must not be prefilled in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from models.engines.installed import vllm_missing
from models.engines.vllm.vllm_engine import VllmEngine
from models.settings import VllmConfig

pytestmark = pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing()))
NUM_PROMPTS, PROMPT_TOKENS = 256, 48  # 12 288 tokens: three steps of 4096


def test_a_crowd_of_seeded_prompts_is_answered_and_each_as_it_would_be_alone(
    model_path: str, ask: Callable[..., Any], prompt_of: Callable[..., tuple[int, ...]]
) -> None:
    engine = VllmEngine(model_path, "policy", VllmConfig(max_batch_rows=NUM_PROMPTS, kv_cache_mb=64))
    prompts = [prompt_of(PROMPT_TOKENS, seed=n) for n in range(NUM_PROMPTS)]

    async def crowd_and_one() -> tuple[list[Any], Any]:
        crowd = await asyncio.gather(*(ask(engine, prompt, n, max_new_tokens=4) for n, prompt in enumerate(prompts)))
        return crowd, await ask(engine, prompts[-1], NUM_PROMPTS - 1, max_new_tokens=4)

    try:
        crowd, alone = asyncio.run(crowd_and_one())
    finally:
        engine.close()
    assert all(len(completion.token_ids) in range(1, 5) for completion in crowd)
    assert crowd[-1].token_ids == alone.token_ids
