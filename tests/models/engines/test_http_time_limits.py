"""Every HTTP call has finite limits for connecting, reading, writing and for a place in its pool."""

from __future__ import annotations

import ast
import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from grmpipe.models.engines.openai.openai_engine import OpenAIEngine
from grmpipe.models.engines.sglang import http_client as sglang_client
from grmpipe.models.engines.sglang import server as sglang_server
from grmpipe.models.engines.sglang.http_client import SglangHttp
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import EngineDied, Message, RequestContext, SamplingParams

ROOT = Path(__file__).parents[3]
LIMITS = {"connect", "read", "write", "pool"}
WALKED = {
    "endpoint_client.py", "http_client.py", "judge_client.py", "server.py", "webhook_tracker.py", "worker_process.py",
}  # fmt: skip
Handler = Callable[[httpx.Request], httpx.Response]


async def ask_openai(handler: Handler) -> None:
    engine = OpenAIEngine("judge", "grm", OpenAIConfig(api_key_env="", max_retries=0), httpx.MockTransport(handler))
    context = RequestContext(request_id="r", group_id="g", role="grm", priority=0)
    await engine.chat((Message(role="user", content="?"),), SamplingParams(max_new_tokens=4, seed=1), context)


async def get_sglang(handler: Handler) -> None:
    await SglangHttp("http://sglang", transport=httpx.MockTransport(handler)).get("/health")


async def post_sglang(handler: Handler) -> None:
    await SglangHttp("http://sglang", transport=httpx.MockTransport(handler)).post("/generate", {})


async def stream_sglang(handler: Handler) -> None:
    async for _ in SglangHttp("http://sglang", transport=httpx.MockTransport(handler)).stream("/generate", {}):
        pass


@pytest.mark.parametrize("call", [ask_openai, get_sglang, post_sglang, stream_sglang])
def test_a_call_waits_for_nothing_without_end(call: Callable) -> None:
    limits: list[dict[str, float | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"])
        choice = {"message": {"content": "4"}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice]})

    asyncio.run(call(answer))
    assert limits
    for limit in limits:
        assert limit.keys() == LIMITS
        assert all(value is not None and 0 < value < math.inf for value in limit.values()), limit


@pytest.mark.parametrize("call", [ask_openai, get_sglang, post_sglang, stream_sglang])
@pytest.mark.parametrize("error", [httpx.ConnectTimeout, httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout])
def test_a_limit_that_is_reached_is_a_death_with_its_name(call: Callable, error: type[httpx.TimeoutException]) -> None:
    def hang(request: httpx.Request) -> httpx.Response:
        raise error("", request=request)

    with pytest.raises(EngineDied, match=error.__name__):
        asyncio.run(call(hang))


@pytest.mark.parametrize("seconds", [sglang_client.ANSWER_S, sglang_server.ANSWER_S])
def test_probes_of_servers_share_one_time_limit(seconds: float) -> None:
    assert 0 < seconds <= 60


def test_no_client_is_made_without_a_limit_and_none_elsewhere() -> None:
    found = set()
    for path in (path for folder in ("models", "scheduler", "grmpipe") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id in {"httpx", "requests", "urllib"}:
                assert node.func.attr not in {"get", "post", "request", "stream", "urlopen"}, path
                if node.func.attr in {"Client", "AsyncClient"}:
                    assert any(keyword.arg == "timeout" for keyword in node.keywords), path
                    found.add(path.name)
    assert found == WALKED
