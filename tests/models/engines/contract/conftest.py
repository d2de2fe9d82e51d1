"""Engines under contract: each kind once per configuration, on one event loop; every test finds them as new."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.http_client import SglangHttp
from grmpipe.models.engines.sglang.sglang_engine import SglangEngine
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.settings import EmbeddedConfig, SglangConfig, VllmConfig
from grmpipe.models.types import WeightBucket, WeightReceipt
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import UnshardedBucket

_replay = importlib.util.spec_from_file_location("sglang_replay", Path(__file__).parents[1] / "sglang_replay.py")
assert _replay is not None and _replay.loader is not None
sglang_replay = sys.modules["sglang_replay"] = importlib.util.module_from_spec(_replay)
_replay.loader.exec_module(sglang_replay)

T = TypeVar("T")
UnderContract = EmbeddedEngine | VllmEngine | SglangEngine
MAX_ROWS = 4
BFLOAT16_NATS = 0.25
SGLANG_PYTHON = os.environ.get("GRMPIPE_SGLANG_PYTHON", "")  # runs the contract on a real server
ONLY_REAL = ("gloo", "sender_that_hangs", "more_urgent")  # a replayed server joins no group and has no queue
SGLANG_RECORD = bool(os.environ.get("GRMPIPE_SGLANG_RECORD"))  # also records its answers


@dataclass(frozen=True)
class Kind:
    """How to make an engine, and how to count the prompt tokens that it computed."""

    make: Callable[[str, bool], UnderContract]
    prefilled: Callable[[Any], int]
    hashes_broadcasts: bool = True
    reads_models: bool = False  # from files
    one_for_both: bool = False  # whether an engine that runs may be told to compute kept requests again
    tolerance: float = 1e-4  # of log-probs beside transformers' in float32, nats


def make_embedded(path: str, recompute: bool) -> EmbeddedEngine:
    return EmbeddedEngine(
        EngineSpec(path=path, role="policy"), EmbeddedConfig(max_batch_rows=MAX_ROWS, recompute_kv_on_sync=recompute)
    )


def make_vllm(path: str, recompute: bool) -> VllmEngine:
    config = VllmConfig(max_batch_rows=MAX_ROWS, kv_cache_mb=16, recompute_kv_on_sync=recompute)
    return VllmEngine(EngineSpec(path=path, role="policy"), config)


def make_embedded_on_gpu(path: str, recompute: bool) -> EmbeddedEngine:
    config = EmbeddedConfig(max_batch_rows=MAX_ROWS, recompute_kv_on_sync=recompute)
    return EmbeddedEngine(EngineSpec(path=path, role="policy", dtype="bfloat16", device="cuda"), config)


def make_vllm_on_gpu(path: str, recompute: bool) -> VllmEngine:
    """As a run starts it: in bfloat16, with graphs."""
    config = VllmConfig(max_batch_rows=MAX_ROWS, kv_cache_mb=256, recompute_kv_on_sync=recompute)
    return VllmEngine(EngineSpec(path=path, role="policy", dtype="bfloat16", device="cuda"), config)


def make_sglang(path: str, recompute: bool) -> SglangEngine:
    config = SglangConfig(python=SGLANG_PYTHON, max_batch_rows=MAX_ROWS, recompute_kv_on_sync=recompute)
    engine = SglangEngine.start(EngineSpec(path=path, role="policy"), config)
    if SGLANG_RECORD:
        engine._http._client._transport = RECORDER
    return engine


def make_replayed(path: str, recompute: bool) -> SglangEngine:
    return SglangEngine(
        SglangHttp(REPLAY.url),
        EngineSpec(path=path, role="policy"),
        SglangConfig(max_batch_rows=MAX_ROWS, recompute_kv_on_sync=recompute),
        Renderer.load(path),
        same_machine=True,
    )


RECORDER, REPLAY = sglang_replay.Recorder(), sglang_replay.ReplayServer()
KINDS = {
    "embedded": Kind(make_embedded, lambda engine: engine.stats().prefilled_tokens, reads_models=True),
    "vllm": Kind(make_vllm, lambda engine: engine.prefilled_tokens, reads_models=True, one_for_both=True),
    "embedded_gpu": Kind(
        make_embedded_on_gpu, lambda engine: engine.stats().prefilled_tokens, reads_models=True, tolerance=BFLOAT16_NATS
    ),
    "vllm_gpu": Kind(
        make_vllm_on_gpu,
        lambda engine: engine.prefilled_tokens,
        reads_models=True,
        one_for_both=True,
        tolerance=BFLOAT16_NATS,
    ),
    "sglang": Kind(make_sglang, lambda engine: engine.prefilled_tokens, hashes_broadcasts=False),
    "sglang_replayed": Kind(make_replayed, lambda engine: engine.prefilled_tokens),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_sglang = pytest.mark.skipif(not SGLANG_PYTHON, reason="GRMPIPE_SGLANG_PYTHON names no interpreter with SGLang")


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("embedded_gpu", marks=[needs_gpu, pytest.mark.gpu]),
        pytest.param("vllm_gpu", marks=[needs_gpu, pytest.mark.gpu, pytest.mark.vllm]),
        pytest.param("sglang", marks=[needs_sglang, pytest.mark.sglang]),
        "sglang_replayed",
    ],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def tolerance(kind: Kind) -> float:
    return kind.tolerance


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """vLLM's engines are bound to the loop that first calls them."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def run(runner: asyncio.Runner) -> Callable[[Coroutine[Any, Any, T]], T]:
    def run_for_a_minute(work: Coroutine[Any, Any, T]) -> T:
        return runner.run(asyncio.wait_for(work, 60))

    return run_for_a_minute


@pytest.fixture(scope="session")
def made(model_path: str, runner: asyncio.Runner) -> Iterator[Callable[[Kind, bool], UnderContract]]:
    engines: dict[tuple[str, bool], UnderContract] = {}

    def make(kind: Kind, recompute: bool) -> UnderContract:
        key = (kind.make.__name__, recompute and not kind.one_for_both)
        if key not in engines:
            engines[key] = kind.make(model_path, recompute)
        engine = engines[key]
        if kind.one_for_both:
            engine._config = replace(engine._config, recompute_kv_on_sync=recompute)
        return engine

    yield make
    for engine in engines.values():
        engine.close()


@pytest.fixture(autouse=True)
def cassette(request: pytest.FixtureRequest, kind: Kind) -> Iterator[None]:
    """The answers of a real SGLang server in this test: replayed, or recorded."""
    path = sglang_replay.cassette_of(request.node.name)
    if kind is KINDS["sglang"] and "sender_that_hangs" in request.node.name:
        pytest.skip("SGLang waits for torch's own half an hour; the engine then counts as dead (test_sglang_engine.py)")
    if kind is KINDS["sglang_replayed"]:
        if not path.exists():
            pytest.skip("only a real server can answer this one")
        REPLAY.load(path)
    RECORDER.begin()
    yield
    if kind is KINDS["sglang"] and SGLANG_RECORD and not any(word in request.node.name for word in ONLY_REAL):
        RECORDER.save(path)


@pytest.fixture
def engine(cassette: None, made: Any, kind: Kind, run: Any, model_path: str) -> Iterator[UnderContract]:
    """An engine that keeps keys and values of kept requests."""
    yield from _clean(made(kind, False), run, model_path)


@pytest.fixture(params=[False, True], ids=["keeping", "recomputing"])
def recompute(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def either_engine(
    cassette: None, made: Any, kind: Kind, recompute: bool, run: Any, model_path: str
) -> Iterator[UnderContract]:
    """An engine that keeps keys and values of kept requests, and one that computes them again after a push."""
    yield from _clean(made(kind, recompute), run, model_path)


def _clean(engine: UnderContract, run: Any, model_path: str) -> Iterator[UnderContract]:
    yield engine
    if engine.version != 0:
        run(push(engine, model_path, version=0))


def all_buckets(path: str, names: Callable[[str], bool] = lambda name: True, per_bucket: int = 4) -> list[WeightBucket]:
    """A model's tensors, or some, a few per bucket: the parts of a layer come in several buckets."""
    tensors = [(name, tensor) for name, tensor in _tensors(load_causal_lm(path)) if names(name)]
    store = ObjectStore("float32")
    return [
        store.post(
            start,
            UnshardedBucket(
                names=tuple(name for name, _ in some),
                shapes=tuple(tuple(tensor.shape) for _, tensor in some),
                tensors=iter([tensor.detach() for _, tensor in some]),
            ),
        )
        for start in range(0, len(tensors), per_bucket)
        if (some := tensors[start : start + per_bucket])
    ]


def _tensors(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


async def push(
    engine: UnderContract, path: str | Path, version: int, names: Callable[[str], bool] = lambda name: True
) -> WeightReceipt:
    await engine.pause()
    await engine.begin_weights()
    for bucket in all_buckets(str(path), names):
        await engine.load_bucket(bucket)
    receipt = await engine.commit_weights(version)
    await engine.resume()
    return receipt


@pytest.fixture(name="push")
def _push() -> Callable[..., Coroutine[Any, Any, WeightReceipt]]:
    """`await push(engine, path, version, names=..)`: pause, begin, all buckets, commit, resume."""
    return push


@pytest.fixture(name="all_buckets")
def _all_buckets() -> Callable[..., list[WeightBucket]]:
    return all_buckets


@pytest.fixture
def greedy(plain: Any) -> Callable[[Sequence[int], int], list[int]]:
    """The text of plain transformers at temperature 0."""

    def write(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(int(plain.logits(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]

    return write


class Begun:
    """Set once a request has its first token: on_first_token=begun, await begun.wait()."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        self._event.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self._event.wait(), 20)


@pytest.fixture
def begun() -> Begun:
    return Begun()
