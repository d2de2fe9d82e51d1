"""Adapters alone at a server that has SGLang's routes for them, as read from version 0.5.23, over a real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.models.adapter_view import AdapterView
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.http_client import SglangHttp
from grmpipe.models.engines.sglang.server import SglangStart, make_arguments
from grmpipe.models.engines.sglang.sglang_adapters import check_targets
from grmpipe.models.engines.sglang.sglang_engine import SglangEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.lora import ADAPTER, adapters, add_adapters, list_outgoing, save_adapters
from grmpipe.models.settings import LoraConfig, SglangConfig
from grmpipe.models.types import EngineDied, GroupLink, PromptScoring, WeightReceipt
from grmpipe.models.weights.safetensors_files import SafetensorsFiles
from grmpipe.models.weights.weight_stream import WeightStream

LORA = LoraConfig(rank=4, alpha=8.0, sync="adapters")
TENSORS = 3 * 7 * 2  # layers, linear layers of each, A and B
Json = dict[str, Any]


class Trained:
    """The learner's model, with adapters as after some steps."""

    def __init__(self, path: str, seed: int, lora: LoraConfig = LORA) -> None:
        self.model, self._lora = add_adapters(load_causal_lm(path), {ADAPTER: lora}, "float32"), lora
        dice = torch.Generator().manual_seed(seed)
        for _, low_rank in adapters(self.model):
            for matrix in (low_rank.a_RI, low_rank.b_OR):
                matrix.data = 0.2 * torch.randn(matrix.shape, generator=dice)

    def score(self, ids: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            logprobs_TV = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]

    async def push_to(self, view: Any, version: int, folder: Path) -> tuple[WeightReceipt, dict[str, str]]:
        """The receipt, and what was sent: in several files, each overwritten by the next but one."""
        stream = WeightStream(self.model, "float32", 1 << 12, list_outgoing(self.model, self._lora, "float32"))
        sender, sent = SafetensorsFiles("float32", folder=str(folder)), {}
        await view.pause()
        try:
            await view.begin_weights()
            for index in range(stream.num_buckets):
                bucket = sender.post(index, stream.unshard_bucket(index))
                sent |= {tensor.name: tensor.checksum for tensor in bucket.tensors}
                await view.load_bucket(bucket)
            return await view.commit_weights(version), sent
        finally:
            sender.close()
            await view.resume()


@dataclass(eq=False)
class Held:
    """An adapter in the server's memory. users: its requests."""

    name: str
    path: str
    weights: dict[str, torch.Tensor]
    users: int = 0


class LoraServer(httpx.AsyncBaseTransport):
    """SGLang's LoRA registry and requests, over merged weights of a real model. Samples greedily.

    going: while it is clear, requests stop after their first token. answering: while it is clear, loads are done but
    not answered.
    """

    def __init__(self, base: PreTrainedModel, max_rank: int = 4, **started_with: str) -> None:
        self.base, self.max_rank = base, max_rank
        self.calls: list[str] = []
        self.pauses: list[str] = []  # by their mode
        self.registry: dict[str, Held] = {}
        self.known: dict[str, str] = {}  # lora_ref_cache: every adapter that was ever loaded -> its folder
        self.lock, self.changed, self.going = asyncio.Lock(), asyncio.Condition(), asyncio.Event()
        self.answering = asyncio.Event()
        self.going.set()
        self.answering.set()
        for name, path in started_with.items():
            self._register(name, path)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        self.calls.append(path)
        if path == "/generate":
            return await self._generate(body)
        if path == "/pause_generation":
            self.pauses.append(body["mode"])
        if path == "/load_lora_adapter":
            return await asyncio.shield(self._update_for(self._load(body["lora_name"], body["lora_path"])))
        if path == "/unload_lora_adapter":
            return await asyncio.shield(self._update_for(self._unload(body["lora_name"])))
        return httpx.Response(200, json={})

    async def _update(self, work: Any) -> str:
        """Loading and unloading take turns. Returns the message of a failure."""
        async with self.lock:
            try:
                await work
            except ValueError as error:
                return str(error)
        return ""

    async def _update_for(self, work: Any) -> httpx.Response:
        """It goes on if its caller leaves."""
        message = await self._update(work)
        await self.answering.wait()
        loaded = {name: held.path for name, held in self.registry.items()}
        body = {"success": not message, "error_message": message, "loaded_adapters": loaded}
        return httpx.Response(400 if message else 200, json=body)

    async def _load(self, name: str, path: str) -> None:
        self._register(name, path)

    def _register(self, name: str, path: str) -> None:
        try:
            config = json.loads(Path(path, "adapter_config.json").read_text())
        except OSError as error:
            raise ValueError(str(error)) from None
        assert config["peft_type"].lower() == "lora"
        if name in self.registry:
            raise ValueError(f"Failed to load LoRA adapter {name} because it is already loaded")
        if config["r"] > self.max_rank:
            raise ValueError(
                f"LoRA adapter {name} with rank {config['r']} is incompatible with the current LoRA memory"
            )
        stored, weights = load_file(Path(path, "adapter_model.safetensors")), dict(self.base.named_parameters())
        for key in (key for key in stored if ".lora_A." in key):
            layer = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            assert layer.split(".")[-2] in config["target_modules"]
            change = stored[key.replace(".lora_A.", ".lora_B.")] @ stored[key]
            weights[layer] = weights[layer].detach() + config["lora_alpha"] / config["r"] * change
        self.registry[name], self.known[name] = Held(name, path, weights), path

    async def _unload(self, name: str) -> None:
        if name not in self.registry:
            raise ValueError(f"LoRA with name {name} does not exist")
        held = self.registry.pop(name)
        async with self.changed:
            await self.changed.wait_for(lambda: not held.users)

    async def _resolve(self, name: str | None) -> Held:
        if name is None:
            return Held("", "", dict(self.base.named_parameters()))
        if name not in self.registry:
            if name not in self.known:
                raise ValueError(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: ...")
            if message := await self._update(self._load(name, self.known[name])):
                raise ValueError(f"Failed to implicitly load LoRA adapter {name}: {message}")
        return self.registry[name]

    async def _generate(self, body: Json) -> httpx.Response:
        ids = body["input_ids"]
        if body.get("stream"):
            return httpx.Response(200, stream=Events(self._stream(ids, body)))
        try:
            held = await self._resolve(body.get("lora_path"))
        except ValueError as error:
            return httpx.Response(400, json={"error": {"message": str(error)}})
        logprobs_TV = self._logprobs(held, ids)
        scored = [[None, ids[0], None]] + [[float(logprobs_TV[t, ids[t + 1]]), ids[t + 1]] for t in range(len(ids) - 1)]
        return httpx.Response(200, json={"output_ids": [], "meta_info": {"input_token_logprobs": scored}})

    async def _stream(self, ids: list[int], body: Json) -> AsyncIterator[bytes]:
        try:
            held = await self._resolve(body.get("lora_path"))
        except ValueError as error:
            yield b"data: " + json.dumps({"error": {"message": str(error)}}).encode() + b"\n\n"
            return
        held.users += 1
        try:
            text = list(ids)
            for number in range(limit := body["sampling_params"]["max_new_tokens"]):
                if number:
                    await self.going.wait()
                logprobs_V = self._logprobs(held, text)[-1]
                text.append(token := int(logprobs_V.argmax()))
                meta = {
                    "completion_tokens": number + 1, "prompt_tokens": len(ids), "weight_version": "0",
                    "finish_reason": {"type": "length"} if number + 1 == limit else None,
                    "output_token_logprobs": [[float(logprobs_V[token]), token, None]],
                }  # fmt: skip
                yield b"data: " + json.dumps({"output_ids": [token], "meta_info": meta}).encode() + b"\n\n"
        finally:
            held.users -= 1
            async with self.changed:
                self.changed.notify_all()

    def _logprobs(self, held: Held, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            output: Any = torch.func.functional_call(self.base, held.weights, (torch.tensor([ids]),))
            return output.logits[0].log_softmax(-1)


class Events(httpx.AsyncByteStream):
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def aclose(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def base(model_path: str) -> PreTrainedModel:
    return load_causal_lm(model_path)


@pytest.fixture(scope="module")
def learners(model_path: str) -> dict[str, Trained]:
    return {name: Trained(model_path, seed) for seed, name in enumerate(("a", "b", "newer"), 21)}


Open = Callable[..., SglangEngine]


@pytest.fixture
def open_on(model_path: str) -> Open:
    """An engine on such a server, with adapters of these names: `a` from a file, if it is given."""

    def open_one(server: LoraServer, *names: str, role: str = "base", a: str | None = None) -> SglangEngine:
        loras = {name: replace(LORA, path=a) if name == "a" else LORA for name in names}
        http = SglangHttp("http://127.0.0.1:1", transport=server)
        spec = EngineSpec(path=model_path, role=role, adapters=loras)
        return SglangEngine(http, spec, SglangConfig(recompute_kv_on_sync=True), Renderer.load(model_path))

    return open_one


def test_each_adapter_answers_as_its_learner_and_a_push_of_one_leaves_all_requests_running(
    base: PreTrainedModel, learners: dict[str, Trained], open_on: Open, ask: Any, prompt_of: Any, tmp_path: Path
) -> None:
    """And each request ends with the version that it began with, which is unloaded after the last one."""
    save_adapters(str(tmp_path / "a"), learners["a"].model, learners["a"].model.state_dict(), LORA)
    ids = prompt_of(20)

    async def scene() -> None:
        server = LoraServer(base, **{"a@0": str(tmp_path / "a")})
        engine = open_on(server, "a", "b", a=str(tmp_path / "a"))
        a, b = AdapterView(engine, "a"), AdapterView(engine, "b")
        assert await a.score(ids) == pytest.approx(learners["a"].score(ids), abs=1e-4)
        assert await b.score(ids) == await engine.score(ids), "a new adapter changes nothing"
        receipt, sent = await learners["b"].push_to(b, 5, tmp_path)
        assert (receipt.version, receipt.checksums, receipt.unapplied) == (5, sent, ())
        assert len(sent) == TENSORS
        server.going.clear()
        begun = [asyncio.Event(), asyncio.Event()]
        kept = [
            asyncio.create_task(ask(view, ids, "kept", max_new_tokens=6, on_first_token=event.set))
            for view, event in zip((a, b), begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        await b.pause()
        waits = asyncio.create_task(ask(b, ids, "waits", max_new_tokens=1))
        assert (await ask(a, ids, "meanwhile", max_new_tokens=1)).oldest_version == 0
        assert not waits.done()
        await learners["newer"].push_to(b, 6, tmp_path)
        assert set(server.registry) == {"a@0", "b@5-1", "b@6-2"}
        assert [(span.model, span.version) for span in (await waits).versions] == [("b", 6)]
        assert await a.score(ids) == pytest.approx(learners["a"].score(ids), abs=1e-4)
        assert "/unload_lora_adapter" not in server.calls, "it would keep other adapters from being loaded"
        await learners["b"].push_to(a, 1, tmp_path)
        server.going.set()
        completions = await asyncio.gather(*kept)
        for name, number, completion in zip(("a", "b"), (0, 5), completions, strict=True):
            whole = learners[name].score((*ids, *completion.token_ids))
            assert completion.logprobs == pytest.approx(whole[len(ids) - 1 :], abs=1e-4)
            assert [span.version for span in completion.versions] == [number]
        scored = await ask(b, ids, "scored", max_new_tokens=1, scoring=PromptScoring(start=1))
        assert scored.scores.logprobs_N.tolist() == pytest.approx(learners["newer"].score(ids), abs=1e-4)
        assert [(span.model, span.version) for span in scored.versions] == [("b", 6)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert set(server.registry) == {"a@1-3", "b@6-2"}

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_an_engine_of_one_adapter_pauses_its_server_and_its_kept_request_ends_with_its_version(
    base: PreTrainedModel, learners: dict[str, Trained], open_on: Open, ask: Any, prompt_of: Any, tmp_path: Path
) -> None:
    ids = prompt_of(20)

    async def scene() -> Any:
        server = LoraServer(base)
        engine = open_on(server, "policy", role="policy")
        server.going.clear()
        begun = asyncio.Event()
        kept = asyncio.create_task(ask(engine, ids, "kept", max_new_tokens=4, on_first_token=begun.set))
        await begun.wait()
        await learners["a"].push_to(engine, 3, tmp_path)
        assert server.calls.index("/pause_generation") < server.calls.index("/load_lora_adapter")
        assert server.pauses == ["in_place"], "nothing is computed again"
        assert await engine.score(ids) == pytest.approx(learners["a"].score(ids), abs=1e-4)
        server.going.set()
        return await kept, await ask(engine, ids, "new", max_new_tokens=4)

    kept, new = asyncio.run(asyncio.wait_for(scene(), 60))
    assert [span.version for span in (*kept.versions, *new.versions)] == [0, 3]


def test_what_the_server_or_the_engine_refuses_has_its_cause_and_leaves_the_last_adapter(
    base: PreTrainedModel, learners: dict[str, Trained], open_on: Open, prompt_of: Any, tmp_path: Path, model_path: str
) -> None:
    ids = prompt_of(20)

    async def scene() -> None:
        server = LoraServer(base)
        engine = open_on(server, "a", "b")
        a = AdapterView(engine, "a")
        await learners["a"].push_to(a, 1, tmp_path)
        server.max_rank = 2
        with pytest.raises(ValueError, match="weights: the adapter a@2-2: .* with rank 4 is incompatible"):
            await learners["b"].push_to(a, 2, tmp_path)
        with pytest.raises(ValueError, match=r"lora_A.default.weight' arrived as \(8, 32\), the engine has \(4, 32\)"):
            await Trained(model_path, 1, replace(LORA, rank=8)).push_to(a, 2, tmp_path)
        await a.pause()
        await a.begin_weights()
        some = AdapterView(engine, "b")
        with pytest.raises(ValueError, match="the adapter b came without '.*gate_proj.lora_A.weight'"):
            await Trained(model_path, 1, replace(LORA, target_modules=["down_proj"])).push_to(some, 2, tmp_path)
        with pytest.raises(ValueError, match=r"^sync\.transport: gloo carries no adapters to SGLang; set disk"):
            await a.begin_weights(
                GroupLink(name="g", backend="gloo", address="h", port=1, rank=1, world_size=2, timeout_s=1)
            )
        with pytest.raises(ValueError, match="keeps its base weights"):
            await engine.pause()
            await engine.begin_weights()
        await a.resume()
        assert await a.score(ids) == pytest.approx(learners["a"].score(ids), abs=1e-4)
        assert set(server.registry) == {"a@1-1"}

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_server_that_lost_an_adapter_counts_as_dead_and_its_successor_gets_it_again(
    base: PreTrainedModel, learners: dict[str, Trained], open_on: Open, ask: Any, prompt_of: Any, tmp_path: Path
) -> None:
    """It would answer no request of this model any more, while each looked like a bad request."""
    ids = prompt_of(20)

    async def scene(restarted: bool) -> None:
        server = LoraServer(base)
        engine = open_on(server, "a", "b")
        await learners["a"].push_to(AdapterView(engine, "a"), 4, tmp_path)
        server.registry.clear()  # evicted: it is loaded again from its folder, which is gone
        if restarted:
            server.known.clear()
        why = "never been loaded: a@4-1" if restarted else "Failed to implicitly load LoRA adapter a@4-1"
        with pytest.raises(EngineDied, match=f"lost the adapter a@4-1: .*{why}"):
            await (AdapterView(engine, "a").score(ids) if restarted else ask(AdapterView(engine, "a"), ids))
        with pytest.raises(EngineDied, match="lost the adapter"):
            await ask(AdapterView(engine, "b"), ids)
        again = AdapterView(open_on(LoraServer(base), "a", "b"), "a")
        await learners["a"].push_to(again, 4, tmp_path)
        assert await again.score(ids) == pytest.approx(learners["a"].score(ids), abs=1e-4)

    for restarted in (False, True):
        asyncio.run(asyncio.wait_for(scene(restarted), 60))


def test_an_adapter_whose_push_was_interrupted_does_not_stay_in_memory(
    base: PreTrainedModel, learners: dict[str, Trained], open_on: Open, tmp_path: Path
) -> None:
    async def scene() -> None:
        server = LoraServer(base)
        a = AdapterView(open_on(server, "a", "b"), "a")
        server.answering.clear()
        pushing = asyncio.create_task(learners["a"].push_to(a, 1, tmp_path))
        while not server.registry:
            await asyncio.sleep(0)
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        server.answering.set()
        while server.registry:
            await asyncio.sleep(0)
        await learners["a"].push_to(a, 1, tmp_path)  # under a name of its own

    asyncio.run(asyncio.wait_for(scene(), 60))


def arguments(path: str, **loras: LoraConfig) -> list[str]:
    spec = EngineSpec(path=path, role="base", device="cuda", adapters=loras)
    return make_arguments(SglangStart(spec=spec, config=SglangConfig(), context_tokens=64))


def test_a_server_is_started_for_its_adapters(model_path: str) -> None:
    some = replace(LORA, rank=16, target_modules=["q_proj", "v_proj"], path="/x/a")
    flags = arguments(model_path, a=some, b=replace(LORA, target_modules=["v_proj", "q_proj", "o_proj"]))
    start = flags.index("--enable-lora")
    assert flags[start:] == [
        "--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "o_proj", "q_proj", "v_proj",
        "--lora-strict-loading", "--lora-paths", '{"lora_name": "a@0", "lora_path": "/x/a"}',
    ]  # fmt: skip
    assert flags[flags.index("--max-loras-per-batch") + 1] == "5", "two versions of each, and the base"
    assert "--enable-lora" not in arguments(model_path)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["k_proj", "v_proj"], "drop the adapters of k_proj without those of q_proj"),
        (["q_proj"], "drop the adapters of q_proj without those of v_proj"),
        (["up_proj", "down_proj"], "drop the adapters of up_proj without those of gate_proj"),
        (["o_proj", "in_proj_qkv"], "applies no adapters to 'in_proj_qkv'"),
    ],
)
def test_layers_that_sglang_would_leave_out_are_refused(targets: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=rf"^lora\.target_modules: SGLang .*{told}.*lora\.sync=merged"):
        check_targets(targets)


def test_adapters_of_a_mixture_are_refused(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, intermediate_size=8,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^lora\.sync: .*mixture of experts.*lora\.sync=merged"):
        arguments(str(tmp_path), a=LORA)
