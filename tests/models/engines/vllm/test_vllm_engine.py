"""What the engine asks of vLLM at a push. Needs no vLLM: its processes are stood in for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import TypeVar

import pytest

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm import vllm_engine
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.settings import VllmConfig
from grmpipe.tiny.resolve import resolve_model

Answer = TypeVar("Answer")


class RecordedLlm:
    """Notes each reset with the salt of requests at that moment. drops: whether its connector forgets too."""

    def __init__(self, drops: bool) -> None:
        self.drops = drops
        self.resets: list[tuple[bool, bool, int]] = []
        self.engine: VllmEngine

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        await asyncio.sleep(0)
        self.resets.append((reset_running_requests, reset_connector, self.engine._generation._prefix_salts["policy"]))
        return self.drops


def engine_with(llm: RecordedLlm, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    async def call(asked: Awaitable[Answer]) -> Answer:
        return await asked

    process = SimpleNamespace(llm=llm, call=call, ask_workers=None, refuse_the_dead=lambda: None)
    monkeypatch.setattr(vllm_engine, "VllmProcess", lambda start, version: process)
    path = resolve_model("tiny://policy")
    llm.engine = VllmEngine(EngineSpec(path=path, role="policy"), VllmConfig(recompute_kv_on_sync=True))
    return llm.engine


def test_a_push_drops_keys_and_values_that_a_connector_stores_before_the_salt_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = RecordedLlm(drops=True)
    engine = engine_with(llm, monkeypatch)
    salt = engine._generation._prefix_salts["policy"]
    asyncio.run(engine._generation.forget_cached_prompts(recompute=True, model="policy"))
    assert llm.resets == [(True, True, salt)], "running requests and the connector, under the old salt"
    assert engine._generation._prefix_salts["policy"] == salt + 1, "what a transfer in flight stores later isn't found"


def test_a_connector_that_keeps_old_keys_and_values_stops_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(RecordedLlm(drops=False), monkeypatch)
    with pytest.raises(RuntimeError, match=r"kv_transfer_config.*recompute_kv_on_sync=false"):
        asyncio.run(engine._generation.forget_cached_prompts(recompute=True, model="policy"))
