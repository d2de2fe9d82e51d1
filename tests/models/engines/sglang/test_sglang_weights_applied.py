"""What a server's checksums of its own parameters prove about a push."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np

from grmpipe.models.checksum import checksum
from grmpipe.models.engines.sglang.http_client import SglangHttp
from grmpipe.models.engines.sglang.sglang_weights import SglangWeights, find_unapplied, read_digests
from grmpipe.models.types import InlineBytes, WeightBucket, WeightReceipt, WeightTensor

LAYER = "model.layers.0"
SENT = (
    f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.mlp.experts.3.gate_proj.weight",
    f"{LAYER}.mlp.experts.3.down_proj.weight", "model.norm.weight", "of.another.kind",
)  # fmt: skip
HELD = (f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.experts.w13_weight", f"{LAYER}.mlp.experts.w2_weight",
        "model.norm.weight")  # fmt: skip


def answer(*versions: str) -> dict:
    return {"ranks": [{"checksums": {name: f"{name}{v}" for name in HELD}, "per_gpu_checksum": v} for v in versions]}


def test_dropped_experts_are_reported_and_a_change_on_one_rank_suffices() -> None:
    old, new = (dict.fromkeys(SENT, v) for v in ("1", "2"))
    before, stands_still = read_digests(answer("a", "a")), read_digests(answer("a", "a"))
    assert find_unapplied(new, old, before, read_digests(answer("a", "b"))) == ()
    assert find_unapplied(new, old, before, stands_still) == tuple(sorted(SENT[:4]))
    no_experts = {n: d if "experts" in n else ("b", "b") for n, d in stands_still.items()}
    assert find_unapplied(new, old, before, no_experts) == tuple(sorted(SENT[1:3]))


def test_tensors_that_did_not_change_or_were_never_sent_before_prove_nothing() -> None:
    same, held = dict.fromkeys(SENT, "1"), read_digests(answer("a"))
    assert find_unapplied(same, same, held, held) == ()
    assert find_unapplied(same, {}, held, held) == ()
    assert find_unapplied({**same, "model.norm.weight": ""}, dict.fromkeys(SENT, "0"), {}, held) == ()
    assert read_digests({}) == {}


def test_a_server_on_a_gpu_is_asked_after_each_push_and_one_that_refuses_only_once(model_path: str) -> None:
    state = {"sum": "a", "moves": True}

    def handle(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        asked.append(path)
        if path == "/weights_checker":
            told = {"ranks": [{"checksums": {"model.norm.weight": state["sum"]}}]}
            return httpx.Response(200, json=told) if state["moves"] is not None else httpx.Response(400, json={})
        if path == "/update_weights_from_disk" and state["moves"]:
            state["sum"] = str(state["sum"]) + "+"
        return httpx.Response(200, json={"weight_version": "3"})

    async def push(weights: SglangWeights, value: float) -> WeightReceipt:
        data = np.full(32, value, np.float32).view(np.uint8)
        tensor = WeightTensor(name="model.norm.weight", dtype="float32", shape=(32,), checksum=checksum(data))
        await weights.begin(None)
        await weights.load(WeightBucket(tensors=(tensor,), payload=InlineBytes(data=(data,))))
        return await weights.commit(3)

    async def scene() -> None:
        http = SglangHttp("http://127.0.0.1:1", "key", lambda: "", transport=httpx.MockTransport(handle))
        weights = SglangWeights(http, model_path, same_machine=True, tells_parameters=True)
        assert [(await push(weights, value)).unapplied for value in (1.0, 2.0)] == [(), ()]
        state["moves"] = False
        assert (await push(weights, 3.0)).unapplied == ("model.norm.weight",)
        state["moves"] = None
        asked.clear()
        assert [(await push(weights, value)).unapplied for value in (4.0, 5.0)] == [(), ()]
        assert asked.count("/weights_checker") == 1

    asked: list[str] = []
    asyncio.run(scene())
