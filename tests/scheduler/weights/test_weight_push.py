"""The control calls of a push by broadcasts: their number, and one that is given up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.lm.causal_lm import make_on_meta
from grmpipe.models.lm.checkpoint_names import CheckpointNames
from grmpipe.models.types import Broadcast, GroupLink, WeightBucket, WeightPush, WeightReceipt, WeightTensor
from grmpipe.models.weights.weight_stream import WeightStream
from grmpipe.scheduler.processes.engine_host import Headers, encode_headers
from grmpipe.scheduler.processes.remote_engine import RemoteEngine
from grmpipe.scheduler.weights.weight_push import SyncConfig
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.learner.learner_ranks import LearnerRanks
from tests.scheduler.processes.test_remote_engine import Wire

LINK = GroupLink(name="g", backend="gloo", address="", port=0, rank=1, world_size=2, timeout_s=1.0)


def make_headers(num_layers: int, hidden: int, expert: int, heads: int) -> Headers:
    """The tensors of a mixture as it is sent to vLLM: Qwen3-30B-A3B and Qwen3-235B-A22B by their sizes."""
    config = Qwen3MoeConfig(
        num_hidden_layers=num_layers, hidden_size=hidden, moe_intermediate_size=expert, num_attention_heads=heads,
        num_key_value_heads=4, head_dim=128, num_experts=128, vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip
    model = make_on_meta(AutoModelForCausalLM, config, "bfloat16")
    stream = WeightStream(model, "bfloat16", 0, names=CheckpointNames.of(config))
    return tuple(
        tuple(
            WeightTensor(name=name, dtype="bfloat16", shape=shape, checksum="")
            for name, shape in stream.list_shapes(index).items()
        )
        for index in range(stream.num_buckets)
    )


class Ranks:
    """The actors of a learner. Counts what they are asked."""

    def __init__(self, size: int, headers: Headers) -> None:
        self.size, self.calls = size, Counter[str]()
        self._headers = headers

    async def call(self, rank: int, method: str, *args: object) -> object:
        self.calls[method] += 1
        match method:
            case "sender.list_tensors":
                return self._headers
            case "sender.num_fixed_buckets":
                return 0
            case "sender.broadcast":
                return {} if rank else {tensor.name: "sum" for bucket in self._headers for tensor in bucket}
            case "score":
                return (-1.0,)
            case "sender.connect":
                return None
        raise NotImplementedError(method)

    async def call_all(self, method: str, *args: object) -> list[object]:
        return [await self.call(rank, method, *args) for rank in range(self.size)]

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        raise NotImplementedError(method)

    async def close(self) -> None: ...


class Receiver(SimulatedEngine):
    """Receives nothing, and reports what it was told of."""

    def __init__(self) -> None:
        super().__init__("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"))
        self.loaded: list[int] = []
        self.sums: dict[str, str] = {}
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load_bucket(self, bucket: WeightBucket) -> None:
        assert isinstance(bucket.payload, Broadcast)
        self.loaded.append(len(bucket.tensors))
        await self.may_load.wait()
        self.sums |= {tensor.name: "sum" for tensor in bucket.tensors}

    async def commit_weights(self, version: int) -> WeightReceipt:
        await super().commit_weights(version)
        return WeightReceipt(version=version, checksums=self.sums)


async def start(engine: Receiver) -> tuple[RemoteEngine, Wire]:
    wire = Wire()
    await wire.call("start", lambda rank: engine, 0)
    wire.calls.clear()
    return RemoteEngine(wire), wire


async def count_calls(headers: Headers, num_engines: int, num_ranks: int) -> Counter[str]:
    async def address() -> tuple[str, int]:
        return "127.0.0.1", 1

    far = [Receiver() for _ in range(num_engines)]
    ends = [await start(engine) for engine in far]
    ranks = Ranks(num_ranks, headers)
    sync = WeightSync(LearnerRanks(ranks), (1, 2), SyncConfig(), transport="gloo", group="gloo", new_address=address)
    report = await sync.push(lambda: {f"policy-{index}": engine for index, (engine, _) in enumerate(ends)}, 3)
    assert report.num_bytes == sum(2 * n for bucket in headers for n in map(count_values, bucket))
    assert all(engine.loaded == [len(bucket) for bucket in headers] and engine.version == 3 for engine in far)
    return sum((wire.calls for _, wire in ends), ranks.calls)


def count_values(tensor: WeightTensor) -> int:
    number = 1
    for size in tensor.shape:
        number *= size
    return number


@pytest.mark.parametrize(
    ("sizes", "num_tensors", "most_buckets"),
    [
        ((48, 2048, 768, 32), 18867, 100),
        pytest.param((94, 4096, 1536, 64), 36945, 600, marks=pytest.mark.long),
    ],
    ids=["30B-A3B", "235B-A22B"],
)
def test_calls_of_a_push_grow_with_engines_and_ranks_and_not_with_tensors_or_buckets(
    sizes: tuple[int, int, int, int], num_tensors: int, most_buckets: int
) -> None:
    headers = make_headers(*sizes)
    assert sum(map(len, headers)) == num_tensors and 50 < len(headers) <= most_buckets
    for num_engines, num_ranks in ((1, 1), (3, 2)):
        calls = asyncio.run(count_calls(headers if num_ranks == 1 else headers[:1], num_engines, num_ranks))
        assert calls["receive_weights"] == num_engines and calls["sender.broadcast"] == num_ranks
        # Each engine pauses, receives, resumes and scores; each rank scores and sends; and one rank is asked thrice.
        assert calls.total() == 4 * num_engines + 2 * num_ranks + 3
        assert calls == asyncio.run(count_calls(headers[:2], num_engines, num_ranks))


@pytest.mark.parametrize("begins_otherwise", [False, True])
def test_a_push_that_was_given_up_ends_before_its_next_bucket_when_another_begins(begins_otherwise: bool) -> None:
    async def main() -> None:
        far = Receiver()
        engine, _ = await start(far)
        tensors = [WeightTensor(name=name, dtype="float32", shape=(1,), checksum="") for name in "abc"]
        old, new = (
            WeightPush(version=version, link=LINK, headers=encode_headers(tuple((tensor,) for tensor in tensors)))
            for version in (1, 2)
        )
        await engine.pause()
        far.may_load.clear()
        first = asyncio.create_task(engine.receive_weights(old))
        while not far.loaded:
            await asyncio.sleep(0)
        second = asyncio.create_task(engine.begin_weights() if begins_otherwise else engine.receive_weights(new))
        await asyncio.sleep(0.01)
        far.may_load.set()
        with pytest.raises(ConnectionError, match="the push of version 1 was given up"):
            await first
        await second
        assert (len(far.loaded), far.version) == ((1, 0) if begins_otherwise else (4, 2))

    asyncio.run(main())
