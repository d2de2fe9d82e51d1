"""A real SGLang server, if GRMPIPE_SGLANG_PYTHON names an interpreter that has it: what no recording can show."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grmpipe.models.adapter_view import AdapterView
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.http_client import SglangHttp
from grmpipe.models.engines.sglang.server import SglangServer, SglangStart
from grmpipe.models.engines.sglang.sglang_engine import SglangEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.lora import ADAPTER, adapters, add_adapters, list_outgoing
from grmpipe.models.settings import LoraConfig, SglangConfig
from grmpipe.models.types import Broadcast, EngineDied, EngineRefused, GroupLink, WeightBucket
from grmpipe.models.weights.broadcast import GlooBroadcasts
from grmpipe.models.weights.safetensors_files import SafetensorsFiles
from grmpipe.models.weights.weight_stream import WeightStream

PYTHON = os.environ.get("GRMPIPE_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="GRMPIPE_SGLANG_PYTHON names no interpreter with SGLang"),
    pytest.mark.timeout(600),
]
Go = Callable[[SglangEngine], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def server(model_path: str) -> Iterator[SglangServer]:
    server = start_server(model_path)
    yield server
    server.forget()


def start_server(model_path: str, **options: Any) -> SglangServer:
    return SglangServer(
        SglangStart(
            spec=EngineSpec(path=model_path, role="policy"),
            config=SglangConfig(python=PYTHON, max_batch_rows=32, **options),
            context_tokens=128,
        )
    )


def with_engine(server: SglangServer, model_path: str, go: Go) -> Any:
    engine = SglangEngine(
        SglangHttp(server.url, server.key, server.post_mortem),
        EngineSpec(path=model_path, role="policy"),
        SglangConfig(),
        Renderer.load(model_path),
        same_machine=True,
    )

    async def run() -> Any:
        return await go(engine)

    return asyncio.run(run())


def test_a_stranger_without_the_key_gets_nothing(server: SglangServer) -> None:
    async def go() -> None:
        for key in ("", "another"):
            with pytest.raises(EngineRefused):
                await SglangHttp(server.url, key).post("/generate", {"input_ids": [1]})

    asyncio.run(go())


def test_on_a_cpu_sleep_frees_nothing_and_says_so(server: SglangServer, model_path: str, prompt_of: Any) -> None:
    async def go(engine: SglangEngine) -> None:
        before = await engine.score(prompt_of(20))
        await engine.pause()
        assert await engine.sleep() == 0
        await engine.wake()
        await engine.resume()
        assert await engine.score(prompt_of(20)) == pytest.approx(before, abs=1e-4)

    with_engine(server, model_path, go)


def test_a_server_is_joined_and_gets_its_own_weights_back(
    server: SglangServer, model_path: str, next_version_path: str, tmp_path: Path, prompt_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An earlier run pushed weights to it, and ended during its next push."""
    sender = SafetensorsFiles("float32", folder=str(tmp_path))
    stream = WeightStream(load_causal_lm(next_version_path), "float32", bucket_bytes=1 << 30)

    async def push_and_leave(engine: SglangEngine) -> Any:
        before = await engine.score(prompt_of(20))
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(sender.post(0, stream.unshard_bucket(0)))
        await engine.commit_weights(5)
        return before

    before = with_engine(server, model_path, push_and_leave)
    monkeypatch.setenv("SGLANG_API_KEY", server.key)
    joined = SglangEngine.join(server.url, EngineSpec(path=model_path, role="policy"), SglangConfig(urls=[server.url]))
    assert asyncio.run(joined.score(prompt_of(20))) == pytest.approx(before, abs=1e-4)
    with pytest.raises(ValueError, match=r"engine\.sglang\.urls"):
        SglangEngine.join(
            server.url, EngineSpec(path=next_version_path, role="policy"), SglangConfig(urls=[server.url])
        )


def test_a_sender_that_leaves_in_mid_push_costs_an_error_and_no_restart(
    server: SglangServer, model_path: str, prompt_of: Any
) -> None:
    sender, link = GlooBroadcasts("float32", torch.device("cpu")), link_of("leaving")
    stream = WeightStream(load_causal_lm(model_path), "float32", bucket_bytes=1 << 14)

    async def go(engine: SglangEngine) -> None:
        await engine.pause()
        await asyncio.gather(engine.begin_weights(link), asyncio.to_thread(sender.connect, replace(link, rank=0)))
        posted = sender.post(0, stream.unshard_bucket(0))
        loading = asyncio.create_task(engine.load_bucket(WeightBucket(tensors=posted.tensors, payload=Broadcast())))
        await asyncio.sleep(0.3)
        sender.close()
        with pytest.raises(ConnectionError, match=posted.tensors[0].name):
            await asyncio.wait_for(loading, 30)
        await engine.begin_weights()
        await engine.commit_weights(0)
        await engine.resume()
        assert len(await engine.score(prompt_of(20))) == 19

    with_engine(server, model_path, go)


def test_an_option_that_sglang_does_not_know_is_refused_in_its_own_words(model_path: str) -> None:
    with pytest.raises(ValueError, match=r"engine\.sglang\.options: .*--no-such-thing"):
        start_server(model_path, options={"no-such-thing": 1})


def test_a_killed_server_is_a_dead_engine_within_seconds(model_path: str, ask: Any, prompt_of: Any) -> None:
    engine = SglangEngine.start(EngineSpec(path=model_path, role="policy"), SglangConfig(python=PYTHON))

    async def go() -> None:
        asked = [asyncio.create_task(ask(engine, prompt_of(20 + i), i, max_new_tokens=90)) for i in range(8)]
        await asyncio.sleep(0.3)
        (process_id,) = engine.process_ids()
        os.kill(process_id, signal.SIGKILL)
        killed_at = time.monotonic()
        for result in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10):
            assert isinstance(result, EngineDied) or result.finish_reason in ("stop", "length")
        assert time.monotonic() - killed_at < 5
        with pytest.raises(EngineDied, match="Its log is"):
            await ask(engine, prompt_of(5), "next")

    try:
        asyncio.run(go())
    finally:
        engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang applies adapters on GPUs only")
def test_two_adapters_answer_as_their_learners_push_after_push(
    model_path: str, tmp_path: Path, ask: Any, prompt_of: Any
) -> None:
    lora, ids = LoraConfig(rank=4, alpha=8.0, sync="adapters"), prompt_of(40)
    spec = EngineSpec(
        path=model_path, role="base", dtype="bfloat16", device="cuda", adapters={"a": lora, "b": replace(lora, rank=8)}
    )
    engine = SglangEngine.start(spec, SglangConfig(python=PYTHON, max_batch_rows=4))

    async def push(view: AdapterView, model: Any, version: int) -> None:
        await view.pause()
        await view.begin_weights()
        stream = WeightStream(model, "bfloat16", 1 << 12, list_outgoing(model, lora, "bfloat16"))
        for index in range(stream.num_buckets):
            await view.load_bucket(sender.post(index, stream.unshard_bucket(index)))
        await view.commit_weights(version)
        await view.resume()

    async def go() -> None:
        views = {name: AdapterView(engine, name) for name in ("a", "b")}
        for version, name in ((1, "a"), (1, "b"), (2, "a")):
            begun = asyncio.Event()
            model = add_adapters(load_causal_lm(model_path), {ADAPTER: spec.adapters[name]}, "float32", version)
            dice = torch.Generator().manual_seed(version)
            for _, low_rank in adapters(model):
                low_rank.b_OR.data = 0.2 * torch.randn(low_rank.b_OR.shape, generator=dice)
            kept = asyncio.create_task(
                ask(views["b"], ids, f"{name}{version}", max_new_tokens=60, on_first_token=begun.set)
            )
            await begun.wait()
            await push(views[name], model, version)
            with torch.no_grad():
                logprobs_TV = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            expected = [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]
            assert await views[name].score(ids) == pytest.approx(expected, abs=0.25)
            assert len({span.version for span in (await kept).versions}) == 1

    sender = SafetensorsFiles("bfloat16", folder=str(tmp_path))
    try:
        asyncio.run(go())
    finally:
        sender.close()
        engine.close()


def link_of(name: str) -> GroupLink:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return GroupLink(
        name=f"{name}-{port}", backend="gloo", address="127.0.0.1", port=port, rank=1, world_size=2, timeout_s=20.0
    )
