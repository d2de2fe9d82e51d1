"""An SGLang engine with a server that breaks, gives wrong answers or hangs. The server is scripted, without HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.http_client import SglangHttp
from grmpipe.models.engines.sglang.sglang_engine import SglangEngine
from grmpipe.models.settings import SglangConfig
from grmpipe.models.types import (
    Broadcast,
    EngineDied,
    EngineRefused,
    GroupLink,
    InlineBytes,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightTensor,
)

Reply = Callable[[dict[str, Any]], Any]
LINK = GroupLink(name="g", backend="gloo", address="127.0.0.1", port=1, rank=1, world_size=2, timeout_s=0.05)
TENSOR = WeightTensor(name="model.norm.weight", dtype="float32", shape=(32,), checksum="")
BUCKET = WeightBucket(tensors=(TENSOR,), payload=Broadcast())
KEY = "never-to-be-seen"


class Script(httpx.AsyncBaseTransport):
    """Answers by path; other paths get an empty answer."""

    def __init__(self, **replies: Reply) -> None:
        self.replies = replies
        self.calls: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request.url.path)
        reply = self.replies.get(request.url.path.strip("/").replace("/", "_"), lambda body: {})
        answer = reply(json.loads(request.content or b"{}"))
        if asyncio.iscoroutine(answer):
            answer = await answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)


def engine_of(model_path: str, script: Script, served_path: str | None = None, **options: Any) -> SglangEngine:
    http = SglangHttp("http://127.0.0.1:1", KEY, lambda: "; post mortem", transport=script)
    config = SglangConfig(**options)
    renderer = Renderer.load(model_path)
    spec = EngineSpec(path=model_path, role="policy")
    return SglangEngine(http, spec, config, renderer, served_path=served_path)


def ask(
    engine: SglangEngine, request_id: str = "r", prompt_ids: tuple[int, ...] = (1, 2, 3), priority: int = 0
) -> Coroutine[Any, Any, Any]:
    context = RequestContext(request_id=request_id, group_id="g", role="policy", priority=priority)
    return engine.generate(prompt_ids, SamplingParams(max_new_tokens=4), context)


def streamed(*chunks: bytes, error: Exception | None = None) -> httpx.Response:
    async def events() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
        if error is not None:
            raise error

    class Stream(httpx.AsyncByteStream):
        def __aiter__(self) -> AsyncIterator[bytes]:
            return events()

    return httpx.Response(200, stream=Stream())


def event(ids: list[int], finish: dict[str, Any] | None, version: str = "0") -> bytes:
    meta = {
        "completion_tokens": len(ids), "prompt_tokens": 3, "cached_tokens": 0, "weight_version": version,
        "finish_reason": finish, "output_token_logprobs": [[-1.0, token_id, None] for token_id in ids],
    }  # fmt: skip
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


def refused(body: Any) -> httpx.Response:
    return httpx.Response(400, json={"success": False, "message": "size mismatch"})


async def hang(body: Any = None) -> Any:
    await asyncio.Event().wait()


def fail(error: Exception) -> Reply:
    def reply(body: Any) -> Any:
        raise error

    return reply


@pytest.mark.parametrize(
    "reply",
    [
        fail(httpx.ConnectError("refused")),
        lambda body: httpx.Response(503, text="shutting down"),
        lambda body: streamed(event([5], None), error=httpx.ReadError("reset")),
    ],
)
def test_a_server_that_goes_away_is_a_dead_engine_at_once_and_for_all(model_path: str, reply: Reply) -> None:
    async def go() -> None:
        engine = engine_of(model_path, Script(generate=reply))
        with pytest.raises(EngineDied):
            await ask(engine)
        for call in (lambda: ask(engine, "next"), engine.pause, lambda: engine.score((1, 2))):
            with pytest.raises(EngineDied, match="post mortem"):
                await call()

    asyncio.run(go())


def test_an_answer_that_ends_in_the_middle_is_for_another_engine_to_give(model_path: str) -> None:
    async def go() -> None:
        script = Script(generate=lambda body: streamed(event([5], None)))
        engine = engine_of(model_path, script)
        with pytest.raises(EngineDied, match="aborted an answer"):
            await ask(engine)
        script.replies["generate"] = lambda body: streamed(event([5, 6], {"type": "length"}))
        assert (await ask(engine)).token_ids == (5, 6)

    asyncio.run(go())


def test_request_that_waits_in_a_pause_fails_when_the_engine_dies(model_path: str) -> None:
    async def go() -> None:
        engine = engine_of(model_path, Script(continue_generation=fail(httpx.ReadError("reset"))))
        await engine.pause()
        asked = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineDied):
            await engine.resume()
        with pytest.raises(EngineDied):
            await asyncio.wait_for(asked, 1)

    asyncio.run(go())


def test_closing_an_engine_tells_who_waits(model_path: str) -> None:
    async def go() -> None:
        engine = engine_of(model_path, Script())
        await engine.pause()
        asked = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.01)
        engine.close()
        with pytest.raises(EngineDied, match="was closed"):
            await asyncio.wait_for(asked, 1)

    asyncio.run(go())


@pytest.mark.parametrize(
    "reply",
    [
        lambda body: httpx.Response(400, json={"error": {"message": "no such grammar"}}),
        lambda body: streamed(b'data: {"error": {"message": "no such grammar"}}\n\n', b"data: [DONE]\n\n"),
    ],
)
def test_refusal_carries_the_servers_message_and_harms_no_other_request(model_path: str, reply: Reply) -> None:
    async def go() -> None:
        script = Script(generate=reply)
        engine = engine_of(model_path, script)
        with pytest.raises(EngineRefused, match="no such grammar"):
            await ask(engine)
        script.replies["generate"] = lambda body: streamed(event([5, 6], {"type": "length"}))
        assert (await ask(engine, "next")).token_ids == (5, 6)

    asyncio.run(go())


def test_a_commit_that_the_server_does_not_echo_is_an_error(model_path: str) -> None:
    async def go() -> None:
        engine = engine_of(model_path, Script(model_info=lambda body: {"weight_version": "6"}))
        await engine.pause()
        await engine.begin_weights()
        with pytest.raises(RuntimeError, match="version 7 was sent to SGLang .* reports 6"):
            await engine.commit_weights(7)
        assert engine.version == 0

    asyncio.run(go())


def test_a_joined_server_that_serves_another_model_later_is_named(model_path: str) -> None:
    async def go() -> None:
        engine = engine_of(model_path, Script(model_info=lambda body: {"model_path": "/other"}), served_path="/mine")
        for request_id in ("first", "second"):
            with pytest.raises(RuntimeError, match=r"engine\.sglang\.urls: .*'/mine', but now serves '/other'"):
                await ask(engine, request_id)

    asyncio.run(go())


def test_an_abort_that_the_server_does_not_answer_returns_what_there_is(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_token_and_nothing_more() -> AsyncIterator[bytes]:
        yield event([5], None)
        await hang()

    class Stream(httpx.AsyncByteStream):
        def __aiter__(self) -> AsyncIterator[bytes]:
            return one_token_and_nothing_more()

    async def go() -> Any:
        monkeypatch.setattr("grmpipe.models.engines.sglang.sglang_engine.ABORT_GRACE_S", 0.05)
        engine = engine_of(model_path, Script(generate=lambda body: httpx.Response(200, stream=Stream())))
        asked = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.02)
        await engine.abort("r")
        return await asyncio.wait_for(asked, 1)

    completion = asyncio.run(go())
    assert (completion.finish_reason, completion.token_ids) == ("abort", (5,))


def test_siblings_wait_for_the_first_ones_first_token_and_share_its_prompt(model_path: str) -> None:
    """By default SGLang computes the same prompt again for each request that comes at the same time."""
    first_token = asyncio.Event()
    asked_for: list[list[int]] = []

    async def slow(body: dict[str, Any]) -> httpx.Response:
        asked_for.append(body["input_ids"])
        if len(asked_for) == 1:
            await first_token.wait()
        return streamed(event([5], {"type": "length"}))

    async def go() -> None:
        engine = engine_of(model_path, Script(generate=slow))
        asked = [asyncio.create_task(ask(engine, f"sibling {i}")) for i in range(4)]
        await asyncio.sleep(0.02)
        assert asked_for == [[1, 2, 3]]
        first_token.set()
        await asyncio.gather(*asked)
        assert len(asked_for) == 4

    asyncio.run(go())


def test_after_a_pause_the_more_urgent_are_sent_first(model_path: str) -> None:
    sent: list[int] = []

    def generate(body: dict[str, Any]) -> httpx.Response:
        sent.append(body["priority"])
        return streamed(event([5], {"type": "length"}))

    async def go() -> None:
        engine = engine_of(model_path, Script(generate=generate))
        await engine.pause()
        asked = [
            asyncio.create_task(ask(engine, str(i), (i, i), priority)) for i, priority in enumerate((5, 5, 0, 7, -1))
        ]
        await asyncio.sleep(0.02)
        await engine.resume()
        await asyncio.gather(*asked)

    asyncio.run(go())
    assert sent == [-1, 0, 5, 5, 7]


def test_cancelling_a_call_aborts_it_at_the_server(model_path: str) -> None:
    aborted: list[str] = []
    asked_for: list[str] = []

    def generate(body: dict[str, Any]) -> Any:
        asked_for.append(body["rid"])
        return hang()

    async def go() -> None:
        engine = engine_of(
            model_path, Script(generate=generate, abort_request=lambda body: aborted.append(body["rid"]))
        )
        asked = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.sleep(0.02)
        assert aborted == asked_for != []

    asyncio.run(go())


def test_a_group_that_does_not_come_together_is_a_connection_error(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        monkeypatch.setattr("grmpipe.models.engines.sglang.sglang_weights.GRACE_S", 0.05)
        engine = engine_of(model_path, Script(init_weights_update_group=hang))
        await engine.pause()
        with pytest.raises(ConnectionError, match="didn't answer within 0.1 s"):
            await engine.begin_weights(LINK)

    asyncio.run(go())


def test_a_session_that_a_dead_run_left_open_is_closed_first(model_path: str) -> None:
    async def go() -> list[str]:
        script = Script()
        script.replies["begin_weight_update"] = lambda body: (
            {} if "/end_weight_update" in script.calls else refused(body)
        )
        engine = engine_of(model_path, script)
        await engine.pause()
        await engine.begin_weights(LINK)
        return script.calls

    assert asyncio.run(go())[-3:] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


def test_a_server_that_hangs_in_a_broadcast_fails_the_push_and_counts_as_dead_at_the_next(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        monkeypatch.setattr("grmpipe.models.engines.sglang.sglang_weights.GRACE_S", 0.05)
        script = Script(update_weights_from_distributed=hang, destroy_weights_update_group=hang)
        engine = engine_of(model_path, script)
        await engine.pause()
        await engine.begin_weights(LINK)
        with pytest.raises(ConnectionError, match="'model.norm.weight' and the following"):
            await engine.load_bucket(BUCKET)
        script.replies["server_info"] = hang
        with pytest.raises(EngineDied, match="hangs in a broadcast"):
            await engine.begin_weights()

    asyncio.run(go())


def test_a_bucket_comes_to_a_server_in_one_broadcast(model_path: str) -> None:
    async def go() -> None:
        bodies: list[Any] = []
        engine = engine_of(model_path, Script(update_weights_from_distributed=lambda body: bodies.append(body) or {}))
        await engine.pause()
        await engine.begin_weights(LINK)
        await engine.load_bucket(BUCKET)
        assert [(body["load_format"], body["names"]) for body in bodies] == [
            ("flattened_bucket", [tensor.name for tensor in BUCKET.tensors])
        ]

    asyncio.run(go())


def test_broadcast_that_can_not_be_loaded_differs_from_one_that_broke_off(
    model_path: str,
) -> None:
    async def go(message: str, error: type[Exception]) -> None:
        reply = httpx.Response(400, json={"success": False, "message": message})
        engine = engine_of(model_path, Script(update_weights_from_distributed=lambda body: reply))
        await engine.pause()
        await engine.begin_weights(LINK)
        with pytest.raises(error, match=message):
            await engine.load_bucket(BUCKET)
        with pytest.raises(ConnectionError, match="no process group was joined"):
            await engine.load_bucket(BUCKET)

    asyncio.run(go("Failed to receive weights: connection closed by peer", ConnectionError))
    asyncio.run(go("Failed to update parameter online: size mismatch", ValueError))


def test_only_a_paused_engine_without_requests_sleeps(model_path: str) -> None:
    async def go() -> None:
        script = Script(generate=lambda body: streamed(event([5], {"type": "length"})))
        engine = engine_of(model_path, script)
        with pytest.raises(RuntimeError, match="paused"):
            await engine.sleep()
        await engine.pause()
        asked = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="without requests"):
            await engine.sleep()
        await engine.resume()
        await asked
        await engine.pause()
        assert await engine.sleep() == 0  # on a CPU nothing is freed, whatever the server reports
        await engine.wake()
        assert script.calls[-2:] == ["/release_memory_occupation", "/resume_memory_occupation"]

    asyncio.run(go())


def test_the_key_is_in_no_error(model_path: str) -> None:
    async def go() -> str:
        engine = engine_of(model_path, Script(generate=fail(httpx.ConnectError("refused"))))
        with pytest.raises(EngineDied) as caught:
            await ask(engine)
        return repr(caught.value) + str(caught.value)

    assert KEY not in asyncio.run(go())


def test_bytes_for_a_server_elsewhere_are_refused_with_the_ways_that_it_takes(model_path: str) -> None:
    async def go() -> None:
        engine = engine_of(model_path, Script())
        await engine.pause()
        await engine.begin_weights()
        with pytest.raises(ValueError, match=r"sync\.transport: .* set disk, gloo or nccl"):
            await engine.load_bucket(WeightBucket(tensors=(), payload=InlineBytes(data=())))

    asyncio.run(go())
