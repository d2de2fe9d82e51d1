"""The learner's end of a push: every transport to an engine, and a bucket that can't be posted."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.lm import unshard
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import Broadcast, GroupLink, WeightBucket
from grmpipe.models.weights import process_group
from grmpipe.models.weights.broadcast import read_checksums
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.transport_ends import WeightTransport
from grmpipe.scheduler.placement import Seat
from grmpipe.scheduler.processes.actors import InProcessRanks
from grmpipe.tiny.resolve import resolve_model
from grmpipe.train.batching.packer import Packer
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec


def make_spec(path: str, transport: str, folder: Path) -> LearnerSpec:
    return LearnerSpec(
        model_path=path, train=TrainConfig(lr=1e-2, warmup_steps=0), algorithm=AlgorithmConfig(), max_new_tokens=8,
        device="cpu", bucket_bytes=1 << 18, transport=transport, sync_dir=str(folder),
    )  # fmt: skip


def two_links(transport: str) -> tuple[GroupLink | None, GroupLink | None]:
    """For the learner and one engine."""
    if transport != "gloo":
        return None, None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    link = GroupLink(
        name=f"weights-{port}", backend="gloo", address="127.0.0.1", port=port, rank=0, world_size=2, timeout_s=60.0
    )
    return link, replace(link, rank=1)


@pytest.mark.parametrize("transport", ["object_store", "shared_memory", "disk", "gloo"])
def test_after_a_step_and_a_push_the_engine_scores_as_the_learner(transport: str, make_samples, tmp_path: Path) -> None:
    path, ids, samples = resolve_model("tiny://policy"), (5, 6, 7, 8, 9), make_samples(4)

    async def push(group: LearnerRanks, engine: EmbeddedEngine) -> None:
        """As the pusher does."""
        mine, engines = two_links(transport)
        async with group.held() as version:
            await engine.pause()
            await asyncio.gather(engine.begin_weights(engines), group.connect(mine))
            number, sent = await group.num_buckets(), {}
            if transport == "gloo":
                listed = await group.list_tensors()
                sending = asyncio.create_task(group.broadcast(0, version))
                for tensors in listed:
                    await engine.load_bucket(WeightBucket(tensors=tensors, payload=Broadcast()))
                sent = await sending
            for index in range(number if transport != "gloo" else 0):
                bucket = await group.bucket(index)
                sent |= {tensor.name: tensor.checksum for tensor in bucket.tensors}
                await engine.load_bucket(bucket)
            assert number > 2 and (await engine.commit_weights(version)).checksums == sent
            await engine.resume()

    async def scenario() -> None:
        seat = Seat(role="learner", rank=0, pool="all", slots=(0,), share=1)
        ranks = await InProcessRanks.start([seat], lambda *_: Learner(make_spec(path, transport, tmp_path)))
        group, engine = LearnerRanks(ranks), EmbeddedEngine(EngineSpec(path=path, role="policy"), EmbeddedConfig())
        packer = Packer(max_tokens=1000, world_size=1)
        for round_ in packer.add(samples) + packer.flush():
            await group.accumulate(round_)
        await group.step(count(samples, 0))
        before = await engine.score(ids)
        await push(group, engine)
        expected = await group.score(ids)
        assert await engine.score(ids) == pytest.approx(expected, abs=1e-4)
        assert max(abs(a - b) for a, b in zip(before, expected, strict=True)) > 1e-2
        await group.close()
        engine.close()
        await ranks.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_a_bucket_that_cannot_be_posted_is_unsharded_to_its_end(
    transport: str, gpt2_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a collective: the other ranks would wait for this one."""
    unsharded: list[Tensor] = []
    whole = unshard.unshard
    monkeypatch.setattr(unshard, "unshard", lambda *args: unsharded.append(whole(*args)) or unsharded[-1])
    learner = Learner(make_spec(gpt2_path, transport, tmp_path))
    bucket = learner.sender.bucket(0)
    assert bucket is not None
    unsharded.clear()
    monkeypatch.setattr(WeightTransport, "_fill", refuse)
    with pytest.raises(ValueError, match="no room"):
        learner.sender.bucket(0)
    assert len(unsharded) == len(bucket.tensors) > 10
    learner.close()
    assert not list(tmp_path.iterdir())


def refuse(*_: object) -> None:
    raise ValueError("no room")


def test_an_unknown_transport_is_refused_by_its_key(gpt2_path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sync\.transport: unknown transport 'pigeon'; known: shared_memory, disk"):
        Learner(make_spec(gpt2_path, "pigeon", tmp_path))


def sender_and_receiver(timeout_s: float = 60.0) -> tuple[GroupLink, GroupLink]:
    mine, engines = two_links("gloo")
    assert mine is not None and engines is not None
    return replace(mine, timeout_s=timeout_s), replace(engines, timeout_s=timeout_s)


def test_the_next_bucket_is_made_while_one_is_sent_and_all_arrive_as_they_are_listed(
    gpt2_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver takes bucket 0 only after bucket 1 was made: the one after the other would wait forever."""
    collectives: list[int] = []
    broadcast = process_group._failure
    monkeypatch.setattr(
        process_group, "_failure", lambda *args: collectives.append(args[1].numel()) or broadcast(*args)
    )
    learner = Learner(replace(make_spec(gpt2_path, "gloo", tmp_path), bucket_bytes=10_000))
    receiver, made = BroadcastLink(), threading.Semaphore(0)
    mine, engines = sender_and_receiver()
    post = learner.sender._transport.post  # type: ignore[union-attr]

    def count(index: int, bucket: Any) -> WeightBucket:
        posted = post(index, bucket)
        made.release()
        return posted

    learner.sender._transport.post = count  # type: ignore[union-attr, method-assign]
    came: dict[str, str] = {}
    with ThreadPoolExecutor(2) as threads:
        joining = threads.submit(receiver.join, engines)
        learner.sender.connect(mine)
        joining.result()
        listed = learner.sender.list_tensors()
        assert len(listed) == learner.sender.num_buckets() > 3
        sending = threads.submit(learner.sender.broadcast, 1, 5)
        made.acquire(timeout=60)
        for tensors in listed[1:]:
            if tensors is not listed[-1]:
                assert made.acquire(timeout=60), "the next one"
            with receive_tensors(WeightBucket(tensors=tensors, payload=Broadcast()), receiver) as held:
                came |= compute_checksums(held)
        assert len(collectives) == 2 * len(listed[1:]), "one for each bucket at each end"
        assert sending.result() == came and len(came) == sum(map(len, listed[1:]))
        assert read_checksums(engines, 5) == came, "also for a process that isn't in the group"
        receiver.leave()
    learner.close()


def test_a_broadcast_without_a_receiver_fails_when_all_is_unsharded_and_the_next_push_starts_again(
    gpt2_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsharding is a collective: the other ranks would wait for this one."""
    unsharded: list[Tensor] = []
    whole = unshard.unshard
    monkeypatch.setattr(unshard, "unshard", lambda *args: unsharded.append(whole(*args)) or unsharded[-1])
    learner = Learner(replace(make_spec(gpt2_path, "gloo", tmp_path), bucket_bytes=10_000))
    listed = learner.sender.list_tensors()
    receiver = BroadcastLink()
    with ThreadPoolExecutor(1) as thread:
        for is_there in (False, True):
            mine, engines = sender_and_receiver(timeout_s=2.0)
            joining = thread.submit(receiver.join, engines)
            learner.sender.connect(mine)
            joining.result()
            unsharded.clear()
            if not is_there:
                receiver.leave()
                with pytest.raises(ConnectionError, match=f"sending '{listed[0][0].name}'"):
                    learner.sender.broadcast(0, 1)
                assert len(unsharded) == sum(map(len, listed))
                continue
            sending = thread.submit(learner.sender.broadcast, 0, 2)
            for tensors in listed:
                with receive_tensors(WeightBucket(tensors=tensors, payload=Broadcast()), receiver) as held:
                    assert len(compute_checksums(held)) == len(tensors)
            assert len(sending.result()) == len(unsharded)
        receiver.leave()
    learner.close()
