"""The driver's view: every call reaches every rank."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence

import numpy as np
import pytest

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.types import GroupLink
from grmpipe.train.batching.packer import MicroBatchRound, Packer, idle
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import BatchTotals, OldPass


class InProcess:
    """One rank, in this process."""

    size = 1

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def call(self, rank: int, method: str, *args: object) -> object:
        return operator.attrgetter(method)(self._learner)(*args)

    async def call_each(self, method: str, args_by_rank: Sequence[tuple]) -> list[object]:
        (args,) = args_by_rank
        return [operator.attrgetter(method)(self._learner)(*args)]

    async def call_all(self, method: str, *args: object) -> list[object]:
        return [operator.attrgetter(method)(self._learner)(*args)]


class Recorded:
    """Two ranks that answer by rank and record their calls."""

    size = 2

    def __init__(self, answers: dict[str, list[object]]) -> None:
        self._answers = answers
        self.asked: list[tuple] = []

    async def call(self, rank: int, method: str, *args: object) -> object:
        self.asked.append((rank, method, *args))
        return self._answers[method][rank]

    async def call_each(self, method: str, args_by_rank: Sequence[tuple]) -> list[object]:
        self.asked += [(rank, method, *args) for rank, args in enumerate(args_by_rank)]
        return self._answers[method]

    async def call_all(self, method: str, *args: object) -> list[object]:
        return await self.call_each(method, [args, args])


def make_group(path: str) -> LearnerRanks:
    return LearnerRanks(
        InProcess(
            Learner(
                LearnerSpec(
                    model_path=path, train=TrainConfig(lr=1e-2), algorithm=AlgorithmConfig(), max_new_tokens=8,
                    device="cpu", bucket_bytes=10_000,
                )
            )
        )
    )  # fmt: skip


def test_ranks_accumulate_step_push_score_and_save(qwen_path: str, make_samples, tmp_path) -> None:
    async def scenario() -> None:
        group, samples = make_group(qwen_path), make_samples()
        packer = Packer(max_tokens=40, world_size=1)
        trained = 0.0
        for round_ in packer.add(samples) + packer.flush():
            old = await group.old_pass(round_)
            trained += (await group.accumulate(round_, old))["train/tokens_sum"]
        assert trained == count(samples, 0).num_loss_tokens
        metrics = await group.step(count(samples, 0))
        assert metrics["train/clip_share"] == 0 and group.version == 1
        async with group.held() as version:
            buckets = [await group.bucket(index) for index in range(await group.num_buckets())]
        assert version == 1 and len(buckets) > 2
        score = await group.score([1, 2, 3])
        await group.begin_save(str(tmp_path / "checkpoint"), in_background=True)
        assert {".metadata", "__0_0.distcp"} == {file.name for file in await group.saved()}
        await group.export(str(tmp_path / "export"))
        other = make_group(qwen_path)
        assert await other.load(str(tmp_path / "checkpoint")) == other.version == 1
        assert await other.score([1, 2, 3]) == score
        assert await make_group(str(tmp_path / "export")).score([1, 2, 3]) == pytest.approx(score, abs=1e-6)

    asyncio.run(scenario())


def test_every_rank_gets_its_own_micro_batch() -> None:
    actors = Recorded({"accumulate": [{"train/loss_sum": 1.0}, {"train/loss_sum": 2.0}]})
    first, second = idle(), idle()
    old = [OldPass(logprobs_T=np.zeros(2)), OldPass(logprobs_T=np.ones(2))]
    sums = asyncio.run(LearnerRanks(actors).accumulate(MicroBatchRound(micro_batches=(first, second)), old))
    assert sums == {"train/loss_sum": 3.0}
    assert [ask[0] for ask in actors.asked] == [0, 1]
    assert actors.asked[0][2] is first and actors.asked[1][2] is second
    assert actors.asked[0][3] is old[0] and actors.asked[1][3] is old[1]


def test_ranks_that_share_samples_get_the_same_micro_batch_and_answer_once() -> None:
    actors = Recorded(
        {
            "accumulate": [
                {"train/loss_sum": 1.0},
                {"train/loss_sum": 1.0},
                {"train/loss_sum": 2.0},
                {"train/loss_sum": 2.0},
            ],
            "reference_logprobs": ["first", "first", "second", "second"],
        }
    )
    actors.size = 4
    group = LearnerRanks(actors, cp=2)
    round_ = MicroBatchRound(micro_batches=(idle(), idle()))
    old = [OldPass(logprobs_T=np.zeros(2)), OldPass(logprobs_T=np.ones(2))]
    assert group.dp_size == 2
    assert asyncio.run(group.accumulate(round_, old)) == {"train/loss_sum": 3.0}
    assert asyncio.run(group.reference_logprobs(round_)) == ["first", "second"]
    for rank, _, micro_batch, *before in actors.asked:
        assert micro_batch is round_.micro_batches[rank // 2]
        assert all(one is old[rank // 2] for one in before)


def test_all_ranks_unshard_each_bucket_and_the_first_one_posts_it_or_each_is_asked_once_to_broadcast_all() -> None:
    actors = Recorded({"sender.connect": [None], "sender.num_buckets": [2, 2], "sender.bucket": ["posted", None],
                       "sender.list_tensors": ["listed", None], "sender.broadcast": [{"w": "sum"}, {}]})  # fmt: skip
    link = GroupLink(name="a", backend="gloo", address="127.0.0.1", port=1, rank=0, world_size=2, timeout_s=1.0)

    async def push() -> list[object]:
        group = LearnerRanks(actors)
        async with group.held() as version:
            assert version == 0
            await group.connect(link)
            posted: list[object] = []
            for index in range(await group.num_buckets()):
                posted.append(await group.bucket(index))
            return [*posted, await group.list_tensors(), await group.broadcast(1, 7)]

    assert asyncio.run(push()) == ["posted", "posted", "listed", {"w": "sum"}]
    assert actors.asked == [
        (0, "sender.connect", link), (0, "sender.num_buckets"),
        (0, "sender.bucket", 0), (1, "sender.bucket", 0), (0, "sender.bucket", 1), (1, "sender.bucket", 1),
        (0, "sender.list_tensors"), (0, "sender.broadcast", 1, 7), (1, "sender.broadcast", 1, 7),
    ]  # fmt: skip


def test_steps_and_loads_wait_while_weights_are_held_and_accumulation_continues() -> None:
    actors = Recorded({"step": [{}, {}], "load": [7, 7], "accumulate": [{}, {}]})
    totals = BatchTotals(num_loss_tokens=1, num_sequences=1, num_groups=1, oldest_version=0)

    async def scenario() -> None:
        group = LearnerRanks(actors)
        async with group.held() as version:
            changes = [asyncio.create_task(group.step(totals)), asyncio.create_task(group.load("somewhere"))]
            await group.accumulate(MicroBatchRound(micro_batches=(idle(), idle())))
            await asyncio.sleep(0)
            assert version == group.version == 0
            assert {ask[1] for ask in actors.asked} == {"accumulate"}
        await asyncio.gather(*changes)
        assert [ask[1] for ask in actors.asked[2:]] == ["step", "step", "load", "load"]
        async with group.held() as version:
            assert version == 7

    asyncio.run(scenario())


def test_a_failed_step_is_no_version() -> None:
    class Failing(Recorded):
        async def call_each(self, method: str, args_by_rank: Sequence[tuple]) -> list[object]:
            raise ArithmeticError

    group = LearnerRanks(Failing({}))
    totals = BatchTotals(num_loss_tokens=1, num_sequences=1, num_groups=1, oldest_version=0)
    with pytest.raises(ArithmeticError):
        asyncio.run(group.step(totals))
    assert group.version == 0


class Slow(Recorded):
    """Takes a moment to accumulate; records what began and ended."""

    def __init__(self) -> None:
        super().__init__({})
        self.log: list[str] = []

    async def call_each(self, method: str, args_by_rank: Sequence[tuple]) -> list[object]:
        self.log.append(f"{method} begins")
        await asyncio.sleep(0.01)
        self.log.append(f"{method} ends")
        return [{}, {}]


def test_calls_wait_while_the_learner_is_still() -> None:
    """Running calls end before; calls made meanwhile wait. Otherwise calls overlap."""

    async def go() -> list[str]:
        actors = Slow()
        group = LearnerRanks(actors)
        round_ = MicroBatchRound(micro_batches=(idle(), idle()))
        first = [asyncio.create_task(group.accumulate(round_)) for _ in range(2)]
        await asyncio.sleep(0)
        async with group.still():
            actors.log.append("still")
            later = asyncio.create_task(group.accumulate(round_))
            await asyncio.sleep(0.02)
            actors.log.append("over")
        await asyncio.gather(*first, later)
        return actors.log

    begins, ends = "accumulate begins", "accumulate ends"
    assert asyncio.run(go()) == [begins, begins, ends, ends, "still", "over", begins, ends]
