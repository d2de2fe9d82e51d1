"""All ranks of a learner, as the driver sees them: one learner."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import numpy as np

from grmpipe.models.types import CudaHandle, CudaHandles, GroupLink, WeightBucket, WeightTensor
from grmpipe.scheduler.processes.actors import ActorRanks
from grmpipe.train.batching.packer import MicroBatchRound
from grmpipe.train.batching.seqlen_balancing import RankWork, work
from grmpipe.train.ranks import Ranks, over_ranks
from grmpipe.types import BatchTotals, Metrics, MicroBatch, OldPass


class LearnerRanks(Ranks):
    """Each actor holds one rank's Learner. Every method is a collective."""

    def __init__(self, actors: ActorRanks, cp: int = 1) -> None:
        super().__init__(actors, cp)
        self._weights = asyncio.Lock()  # held while the weights change, or must not change
        self._work = RankWork()  # the open batch's
        self._tokens = BatchTokens()
        self._computing = self._num_stills = 0  # running calls that take memory, and callers that wait until none runs
        self._none_computing, self._may_compute = asyncio.Event(), asyncio.Event()
        self._may_compute.set()

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self._version

    async def expect(self, num_steps: int) -> None:
        """Set the number of steps of the run: the learning rate decays by it."""
        await self._actors.call_all("expect", num_steps)

    async def accumulate(self, round_: MicroBatchRound, old: Sequence[OldPass] | None = None) -> Metrics:
        """Forward and backward on a round. Returns sums over its micro-batches."""
        self._work.add([_work_of(micro_batch) for micro_batch in round_.micro_batches])
        self._tokens.add(round_.micro_batches)
        before = old if old is not None else [None] * len(round_.micro_batches)
        async with self._takes_memory():
            sums = await self._call_each("accumulate", list(zip(round_.micro_batches, before, strict=True)))
        return _add_up(cast(list[Metrics], sums))

    async def imitate(self, round_: MicroBatchRound, totals: BatchTotals) -> None:
        """Forward and backward on a round of demonstrations, for the step of a batch of this size."""
        self._work.add([_work_of(micro_batch) for micro_batch in round_.micro_batches])
        each = [(micro_batch, totals) for micro_batch in round_.micro_batches]
        async with self._takes_memory():
            await self._call_each("imitate", each)

    async def old_pass(self, round_: MicroBatchRound) -> list[OldPass]:
        """The old pass over each micro-batch, for several updates on one batch."""
        each = [(micro_batch,) for micro_batch in round_.micro_batches]
        async with self._takes_memory():
            return cast(list[OldPass], await self._call_each("old_pass", each))

    async def reference_logprobs(self, round_: MicroBatchRound) -> list[np.ndarray]:
        """log pi_ref of each micro-batch, for a KL that is subtracted from the rewards."""
        each = [(micro_batch,) for micro_batch in round_.micro_batches]
        async with self._takes_memory():
            return cast(list[np.ndarray], await self._call_each("reference_logprobs", each))

    async def step(self, totals: BatchTotals) -> Metrics:
        """End the batch. Raises NonFiniteGradients with the batch discarded."""
        # In this order: a step that waits for a push takes no memory, so `still` needn't wait for that push.
        async with self._weights, self._takes_memory():
            done, tokens = self._work, self._tokens
            self._work, self._tokens = RankWork(), BatchTokens()
            metrics = await self._actors.call_all("step", totals)
            self._version += 1
        waited = {"train/rank_imbalance": done.imbalance} if self.dp_size > 1 else {}
        return over_ranks(cast(list[Metrics], metrics)) | tokens.metrics() | waited

    async def discard(self) -> None:
        self._work, self._tokens = RankWork(), BatchTokens()
        await self._actors.call_all("discard")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        """Context with the version, in which nothing changes the weights: steps and loads wait. Accumulating continues.

        A push calls the methods from `connect` to `score` within it.
        """
        async with self._weights:
            yield self._version

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Context in which nothing takes or frees memory: running calls end first, new ones wait. It doesn't wait for a
        push.
        """
        self._num_stills += 1
        self._may_compute.clear()
        try:
            while self._computing:
                self._none_computing.clear()
                await self._none_computing.wait()
            yield
        finally:
            self._num_stills -= 1
            if not self._num_stills:
                self._may_compute.set()

    @asynccontextmanager
    async def _takes_memory(self) -> AsyncIterator[None]:
        while not self._may_compute.is_set():
            await self._may_compute.wait()
        self._computing += 1
        try:
            yield
        finally:
            self._computing -= 1
            if not self._computing:
                self._none_computing.set()

    async def connect(self, link: GroupLink | None) -> None:
        """Let rank 0 join the engines' group, or leave it. Engines join at the same time."""
        await self._actors.call(0, "sender.connect", link)

    async def num_buckets(self) -> int:
        return cast(int, await self._actors.call(0, "sender.num_buckets"))

    async def num_fixed_buckets(self) -> int:
        return cast(int, await self._actors.call(0, "sender.num_fixed_buckets"))

    async def send_changes(self, wanted: bool) -> None:
        await self._actors.call(0, "sender.send_changes", wanted)

    async def bucket(self, index: int) -> WeightBucket:
        """A bucket, unsharded by all ranks and posted by those that send. At most two are alive: this one and the
        last.
        """
        posted = await self._actors.call_all("sender.bucket", index)
        return _together([cast(WeightBucket, bucket) for bucket in posted if bucket is not None])

    async def list_uncompiled(self) -> str:
        """What rank 0 doesn't compile though train.compile asks for it, and why; empty: nothing."""
        return cast(str, await self._actors.call(0, "list_uncompiled"))

    async def list_tensors(self) -> tuple[tuple[WeightTensor, ...], ...]:
        return cast(tuple[tuple[WeightTensor, ...], ...], await self._actors.call(0, "sender.list_tensors"))

    async def broadcast(self, first: int, version: int) -> dict[str, str]:
        """Let all ranks unshard the buckets from `first` on, and rank 0 broadcast them to the group that it joined.
        Returns the checksums by name.
        """
        return cast(list[dict[str, str]], await self._actors.call_all("sender.broadcast", first, version))[0]

    async def close(self) -> None:
        """Let rank 0 remove its files and leave its group. The actors stay alive."""
        await self._actors.call(0, "close")

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs (temperature 1) of all tokens except the first."""
        scores = await self._actors.call_all("score", tuple(token_ids))
        return cast(tuple[float, ...], scores[0])

    async def average(self, path: str, other: str, share: float) -> None:
        """Let rank 0 replace exported weights by a mean: `share` of their own, the rest from another model."""
        await self._actors.call(0, "average", path, other, share)

    async def load(self, path: str) -> int:
        async with self._weights:
            return await super().load(path)


class BatchTokens:
    """The tokens of a batch that pass through the learner, those that would if no prefix were shared, and those that
    are trained: a token that several samples train counts for each.
    """

    def __init__(self) -> None:
        self._packed = self._unshared = self._trained = 0

    def add(self, micro_batches: Sequence[MicroBatch]) -> None:
        for micro_batch in micro_batches:
            if micro_batch.loss_mask_E.any():  # else an idle rank's
                self._packed += len(micro_batch.token_ids_T)
                self._unshared += int((micro_batch.sample_lengths_S + micro_batch.prefix_lengths_S).sum())
                self._trained += int(micro_batch.loss_mask_E.sum())

    def metrics(self) -> Metrics:
        return {
            "train/packed_tokens": float(self._packed),
            "train/unshared_tokens": float(self._unshared),
            "train/loss_tokens": float(self._trained),
        }


def _work_of(micro_batch: MicroBatch) -> float:
    return sum(map(work, micro_batch.sample_lengths_S.tolist(), micro_batch.prefix_lengths_S.tolist()))


def _together(buckets: Sequence[WeightBucket]) -> WeightBucket:
    """The bucket that rank 0 posted. If every rank posted one, it has the handles of all GPUs: an engine takes those of
    its own.
    """
    first, *others = buckets
    if not others:
        return first
    handles: dict[str, CudaHandle] = {}
    for bucket in buckets:
        assert isinstance(bucket.payload, CudaHandles) and len(bucket.tensors) == len(first.tensors), "one rank sends"
        handles |= dict(bucket.payload.handles)
    return replace(first, payload=CudaHandles(handles=handles))


def _add_up(sums_by_rank: Sequence[Metrics]) -> Metrics:
    return {name: sum(sums[name] for sums in sums_by_rank) for name in sums_by_rank[0]}
