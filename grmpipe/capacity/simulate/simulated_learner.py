"""Processes that only take time: the driver, and the ranks of a learner or a critic. Their driver side is the real
one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grmpipe.capacity.cost import LearnerSpeed
from grmpipe.capacity.plan.work import ToolUse
from grmpipe.capacity.simulate.simulated_answers import filler, zeros
from grmpipe.judge.grm import GrmPrompt, LocalGrm, PromptRenderer
from grmpipe.models.checksum import checksum
from grmpipe.models.engines.simulated.simulated_rate import SharedDevice, SimulatedRate
from grmpipe.models.seeds import is_drawn
from grmpipe.models.types import (
    Completion,
    Generates,
    InlineBytes,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightTensor,
)
from grmpipe.scheduler.routing.router import Router
from grmpipe.train.scalar.scalar_batch import PackedSequences
from grmpipe.types import MicroBatch, OldPass


class SimulatedProcess:
    """A process that does one thing after another.

    device: if it shares one with other processes.
    """

    def __init__(self, device: SharedDevice | None = None) -> None:
        self._device = device or SharedDevice()
        self._turn = asyncio.Lock()
        self._rate = SimulatedRate()
        self._pace_changed = asyncio.Event()

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self._rate.measure_work_s(asyncio.get_running_loop().time())

    def share_changed(self, share: float) -> None:
        self._rate.set_rate(asyncio.get_running_loop().time(), share)
        self._pace_changed.set()

    async def _spend(self, work_s: float) -> None:
        clock = asyncio.get_running_loop().time
        end_s = self._rate.measure_work_s(clock()) + work_s
        self._device.occupy(self)
        try:
            while (when_s := self._rate.when_s(end_s)) > clock():
                self._pace_changed.clear()
                try:
                    async with asyncio.timeout_at(when_s):
                        await self._pace_changed.wait()
                except TimeoutError:
                    break
        finally:
            self._device.vacate(self)
            self._rate.set_rate(clock(), 0.0)


class SimulatedDriver(SimulatedProcess):
    """The simulated driver. Half of a request's time passes before it is sent (rendered, sent), half after the answer
    (parsed, written).

    device: its cores, if others run on them too.
    """

    def __init__(self, request_s: float, device: SharedDevice | None = None) -> None:
        super().__init__(device)
        self._half_s = request_s / 2

    async def attend(self) -> None:
        """Wait for the driver to do the work of a request."""
        if self._half_s:
            async with self._turn:
                await self._spend(self._half_s)


class AttendedGrm(LocalGrm):
    """A GRM whose questions and answers pass through the driver."""

    def __init__(self, name: str, engine: Generates, renderer: PromptRenderer, driver: SimulatedDriver) -> None:
        super().__init__(name, engine, renderer, context_tokens=0)
        self._driver = driver

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        await self._driver.attend()
        completion = await super().ask(prompt, params, context)
        await self._driver.attend()
        return completion

    async def ask_verdict(
        self, prompt: GrmPrompt, judgement: Completion, params: SamplingParams, context: RequestContext
    ) -> Completion:
        """Nothing is asked: the simulated share of unparseable judgements is of those that stay without a verdict."""
        return judgement


class CallingGrm(AttendedGrm):
    """A GRM that calls tools before its verdict: each call ends a turn, takes its time, and returns tokens to read.

    turn_tokens: of a turn that calls. engines: keep the tokens of a judgement between its turns.
    """

    def __init__(
        self,
        name: str,
        engines: Router,
        renderer: PromptRenderer,
        driver: SimulatedDriver,
        use: ToolUse,
        turn_tokens: int,
    ) -> None:
        super().__init__(name, engines, renderer, driver)
        self._engines, self._use, self._turn_tokens = engines, use, turn_tokens

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        use, name, before = self._use, context.request_id, 0
        whole = int(use.turns)
        num_calls = whole + is_drawn(0, f"calls {name}", use.turns - whole)
        try:
            for turn in range(num_calls + 1):
                results, left = zeros(round(turn * use.tokens)), params.max_new_tokens - before
                here = replace(prompt, token_ids=(*prompt.token_ids, *results, *filler(before)))
                own = replace(context, request_id=f"{name}/t{turn}", trajectory_id=name)
                most = left if turn == num_calls else min(left, self._turn_tokens)
                completion = await super().ask(here, replace(params, max_new_tokens=most), own)
                if completion.finish_reason != "length" or most == left:
                    break
                before += len(completion.token_ids)
                await asyncio.sleep(use.seconds)
        finally:
            self._engines.end_trajectory(name)
        return replace(
            completion,
            token_ids=(*filler(before), *completion.token_ids),
            logprobs=(*((-1.0,) * before), *completion.logprobs),
        )


class SimulatedRanks(SimulatedProcess):
    """An ActorGroup: all ranks take part in every call, one call at a time. Pushes of weights are work too.

    device: rank 0's, if others share it; the other ranks behave the same. cp: the ranks that share each sample.
    reference_in_loss: `accumulate` has a pass of the reference.
    """

    def __init__(
        self,
        num_ranks: int,
        speed: LearnerSpeed,
        sync_s: float,
        device: SharedDevice | None = None,
        switch_s: float = 0.0,
        cp: int = 1,
        reference_in_loss: bool = False,
    ) -> None:
        super().__init__(device)
        self._cp = cp
        self._num_ranks = num_ranks
        self._speed = speed
        self._accumulate_s = speed.token_s + (speed.forward_s if reference_in_loss else 0.0)  # per packed token
        self._sync_s = sync_s
        self._switch_s = switch_s

    @property
    def size(self) -> int:
        return self._num_ranks

    async def call(self, rank: int, method: str, *args: object) -> object:
        return (await self._answer(method, [args] * self._num_ranks))[rank]

    async def call_all(self, method: str, *args: object) -> list[object]:
        return await self._answer(method, [args] * self._num_ranks)

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        return await self._answer(method, args_by_rank)

    async def close(self) -> None:
        return None

    async def _answer(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        async with self._turn:
            match method:
                case "accumulate":
                    await self._spend(self._most_tokens(args_by_rank) * self._accumulate_s)
                    return [{}] * self._num_ranks
                case "imitate":
                    await self._spend(self._most_tokens(args_by_rank) * self._speed.token_s)
                    return [None] * self._num_ranks
                case "scores":
                    await self._spend(self._most_tokens(args_by_rank) * self._speed.forward_s)
                    return [np.zeros(num_tokens(args[0]), dtype=np.float32) for args in args_by_rank]
                case "reference_logprobs":
                    await self._spend(self._most_tokens(args_by_rank) * self._speed.forward_s)
                    return [minus_ones(args) for args in args_by_rank]
                case "old_pass":
                    await self._spend(self._most_tokens(args_by_rank) * self._speed.forward_s)
                    return [OldPass(logprobs_T=minus_ones(args)) for args in args_by_rank]
                case "step":
                    await self._spend(self._speed.step_s)
                    return [{}] * self._num_ranks
                case "sender.list_tensors":  # its bucket isn't broadcast
                    return [(BUCKET.tensors,)] * self._num_ranks
                case "sender.broadcast":
                    await self._spend(self._sync_s)
                    return [{tensor.name: tensor.checksum for tensor in BUCKET.tensors}] * self._num_ranks
                case "sender.num_buckets":
                    return [1] * self._num_ranks
                case "sender.num_fixed_buckets":
                    return [0] * self._num_ranks
                case "sender.bucket":
                    await self._spend(self._sync_s)
                    return [BUCKET, *[None] * (self._num_ranks - 1)]  # rank 0 sends
                case "score":
                    (token_ids,) = args_by_rank[0]
                    assert isinstance(token_ids, tuple)
                    return [(-1.0,) * (len(token_ids) - 1)] * self._num_ranks
                case "keep_on_device":  # takes as long as a change of engines on a slot: about as many bytes
                    await self._spend(self._switch_s)
                    return [0] * self._num_ranks
                case "list_uncompiled":
                    return [""] * self._num_ranks
                case "expect" | "discard" | "close" | "sender.connect" | "sender.send_changes":
                    return [None] * self._num_ranks
        raise NotImplementedError(f"a simulated learner doesn't {method}")

    def _most_tokens(self, args_by_rank: Sequence[tuple[object, ...]]) -> int:
        """The tokens that a pass takes the time of: all wait for the rank with most work; speeds are those of all ranks
        together.
        """
        return max(num_tokens(args[0]) for args in args_by_rank) * (self._num_ranks // self._cp)


def num_tokens(micro_batch: object) -> int:
    assert isinstance(micro_batch, MicroBatch | PackedSequences)
    return len(micro_batch.token_ids_T)


def minus_ones(args: tuple[object, ...]) -> np.ndarray:
    """A log-prob for each token of a micro-batch, [T] float32."""
    return np.full(num_tokens(args[0]), -1.0, dtype=np.float32)


WEIGHTS = np.zeros(4, dtype=np.uint8)
BUCKET = WeightBucket(
    tensors=(WeightTensor(name="weights", dtype="float32", shape=(1,), checksum=checksum(WEIGHTS)),),
    payload=InlineBytes(data=(WEIGHTS,)),
)
