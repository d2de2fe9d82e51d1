"""vLLM reports how full it is, and when running requests were preempted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from models.engines.installed import vllm_missing
from models.engines.vllm.vllm_engine import VllmEngine
from models.settings import VllmConfig
from models.types import Pressure

pytestmark = pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing()))
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 48, 24, 64


def test_preemptions_are_counted_when_more_rows_run_than_the_cache_holds(
    model_path: str, ask: Callable[..., Any], prompt_of: Callable[..., tuple[int, ...]]
) -> None:
    engine = VllmEngine(
        model_path, "grm", VllmConfig(max_batch_rows=NUM_PROMPTS, options={"num_gpu_blocks_override": 24})
    )
    prompts = [prompt_of(PROMPT_TOKENS, seed=n) for n in range(NUM_PROMPTS)]

    async def look() -> tuple[list[Pressure], Pressure]:
        asked = [asyncio.create_task(ask(engine, ids, n, max_new_tokens=NEW_TOKENS)) for n, ids in enumerate(prompts)]
        seen = []
        while not all(task.done() for task in asked):
            seen.append(await engine.pressure())
            await asyncio.sleep(0.05)
        await asyncio.gather(*asked)
        return seen, await engine.pressure()

    try:
        seen, last = asyncio.run(look())
    finally:
        engine.close()
    assert last.num_preempted > 0
    assert max(pressure.kv_share for pressure in seen) > 0.8
    assert max(pressure.num_waiting for pressure in seen) > 0
    assert max(pressure.num_running for pressure in seen) > 1
