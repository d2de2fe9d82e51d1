"""Weights that come to an SGLang engine as what changed in them: its server opens folders with every changed value. The
server is scripted, without HTTP.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from grmpipe.models.engines.sglang.http_client import SglangHttp
from grmpipe.models.engines.sglang.sglang_weights import SglangWeights
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.types import WeightDelta
from grmpipe.models.weights.delta import DeltaSender
from grmpipe.models.weights.weight_stream import WeightStream


class Server(httpx.AsyncBaseTransport):
    """Keeps the tensors of every folder that it is told to load."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_disk":
            folder = Path(httpx.Response(200, content=request.content).json()["model_path"])
            self.held |= {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}
        return httpx.Response(200, json={"success": True, "weight_version": "0"})


@pytest.mark.parametrize("transport", ["disk", "object_store"])
def test_a_push_of_changes_leaves_a_server_with_what_a_whole_push_would(
    model_path: str, tmp_path: Path, transport: str
) -> None:
    server, model = Server(), load_causal_lm(model_path)
    weights = SglangWeights(SglangHttp("http://127.0.0.1:1", "", lambda: "", transport=server), model_path, True)
    stream, sender = WeightStream(model, "bfloat16", 1 << 15), DeltaSender(transport, "bfloat16", str(tmp_path))

    async def push(*, is_whole: bool) -> dict[str, torch.Tensor]:
        sender.is_whole, sent = is_whole, {}
        await weights.begin(None)
        for index in range(stream.num_buckets):
            bucket = sender.post(index, stream.unshard_bucket(index))
            assert isinstance(bucket.payload, WeightDelta) and bool(bucket.payload.base) != is_whole
            await weights.load(bucket)
            sent |= {tensor.name: tensor.checksum for tensor in bucket.tensors}
        assert (await weights.commit(0)).checksums == sent
        return dict(server.held)

    async def scene() -> None:
        first = await push(is_whole=True)
        with torch.no_grad():
            for weight in model.parameters():
                weight[torch.rand_like(weight) < 0.1] *= 1.5
        changed = await push(is_whole=False)
        whole = await push(is_whole=True)
        assert same(changed, whole) and not same(changed, first)

    try:
        asyncio.run(scene())
    finally:
        sender.close()


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
