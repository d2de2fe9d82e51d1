"""vLLM with more requests than it holds: seeded ones are answered, and it reports how full it is and who was preempted.

One engine for all tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from models.engines.vllm.vllm_engine import VllmEngine
from models.settings import VllmConfig
from models.types import Pressure

pytestmark = pytest.mark.vllm
NUM_PROMPTS, PROMPT_TOKENS = 256, 48  # 12 288 tokens: three steps of 4096
CACHE_BLOCKS = 560  # of 32 tokens: two for each prompt and little more


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(model_path: str, runner: asyncio.Runner) -> Iterator[VllmEngine]:
    options = {"num_gpu_blocks_override": CACHE_BLOCKS}
    engine = VllmEngine(model_path, "policy", VllmConfig(max_batch_rows=NUM_PROMPTS, kv_cache_mb=64, options=options))
    yield engine
    engine.close()


@pytest.fixture
def prompts(prompt_of: Callable[..., tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [prompt_of(PROMPT_TOKENS, seed=n) for n in range(NUM_PROMPTS)]


def test_a_crowd_of_seeded_prompts_is_answered_and_each_as_it_would_be_alone(
    engine: VllmEngine, runner: asyncio.Runner, ask: Callable[..., Any], prompts: list[tuple[int, ...]]
) -> None:
    """More than one step takes: on a CPU a seeded prompt must not be prefilled in chunks."""

    async def crowd_and_one() -> tuple[list[Any], Any]:
        crowd = await asyncio.gather(*(ask(engine, prompt, n, max_new_tokens=4) for n, prompt in enumerate(prompts)))
        return crowd, await ask(engine, prompts[-1], NUM_PROMPTS - 1, max_new_tokens=4)

    crowd, alone = runner.run(crowd_and_one())
    assert all(len(completion.token_ids) in range(1, 5) for completion in crowd)
    assert crowd[-1].token_ids == alone.token_ids


def test_preemptions_are_counted_when_more_rows_run_than_the_cache_holds(
    engine: VllmEngine, runner: asyncio.Runner, ask: Callable[..., Any], prompts: list[tuple[int, ...]]
) -> None:
    """20 more tokens take a third block of each row."""

    async def look() -> tuple[list[Pressure], Pressure]:
        asked = [asyncio.create_task(ask(engine, ids, n, max_new_tokens=20)) for n, ids in enumerate(prompts)]
        seen = []
        while not all(task.done() for task in asked):
            seen.append(await engine.pressure())
            await asyncio.sleep(0.01)
        await asyncio.gather(*asked)
        return seen, await engine.pressure()

    before = runner.run(engine.pressure()).num_preempted
    seen, last = runner.run(look())
    assert last.num_preempted > before
    assert max(pressure.kv_share for pressure in seen) > 0.8
    assert max(pressure.num_waiting for pressure in seen) > 0
    assert max(pressure.num_running for pressure in seen) > 1
