"""An engine that only takes time: scripted answers at a given speed, by the loop's clock. For tests and simulation.

Everything else is real: requests are batched, queued by priority and kept over a pause, prompts are cached, versions
recorded in spans, received weights hashed. Events are changes of the batch, never tokens.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from grmpipe.models.checksum import checksum
from grmpipe.models.engines.simulated.simulated_batch import SimulatedBatch, SimulatedRow
from grmpipe.models.engines.simulated.simulated_rate import SharedDevice, SimulatedRate
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    EngineSpeed,
    FinishReason,
    GroupLink,
    InlineBytes,
    PromptScoring,
    RequestContext,
    SamplingParams,
    TokenScores,
    VersionSpan,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
    join_spans,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One scripted answer: its ids and text; or the scores of a prompt, which take the time of one token."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason = "stop"
    scores: TokenScores | None = None


# Writes an answer. May raise EngineRefused, or EngineDied for a request that kills the engine.
Author = Callable[[Sequence[int], SamplingParams, RequestContext], Script]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A request without an answer yet."""

    row: SimulatedRow
    script: Script
    answer: asyncio.Future[Completion]
    on_first_token: Callable[[], None]


class SimulatedEngine:
    """A simulated engine. Answers by `author`, as fast as `speed` says; without it, each row at `tokens_per_s`, however
    many there are. Every token's log-prob is -1.

    device: if the engine shares its device with other processes.
    """

    def __init__(
        self,
        model_name: str,
        author: Author,
        *,
        speed: EngineSpeed | None = None,
        tokens_per_s: float = 1e4,
        version: int = 0,
        prefix_cache: bool = True,
        device: SharedDevice | None = None,
    ) -> None:
        self.model_name = model_name
        self.version = version
        self._author = author
        self._batch = SimulatedBatch(speed or rows_apart(tokens_per_s), prefix_cache=prefix_cache)
        self._rate = SimulatedRate()
        self._device = device
        self._share = 1.0  # its share of the device
        self._occupies = False
        self._paused = False
        self._pending: dict[str, Pending] = {}
        self._by_row: dict[SimulatedRow, Pending] = {}
        self._timer: asyncio.Handle | None = None
        self._timer_s = 0.0  # stored here: a timer of uvloop, which Ray's actors may use, may not have its time
        self._versions: list[tuple[int, int]] = [(0, version)]  # (step after which it samples, version)
        self._checksums: dict[str, str] = {}
        self._death: str | None = None

    @property
    def busy_s(self) -> float:
        """Seconds of work so far, as on its own device."""
        return self._rate.measure_work_s(asyncio.get_running_loop().time())

    def least_busy_s(self, num_rows: int) -> float:
        """Seconds that the work so far would have taken in batches of `num_rows`, without any preemption."""
        worked_s = self._worked_s()
        return worked_s - self._batch.estimate_saved_s(worked_s, num_rows)

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that no prefix cache had, and those of preempted requests that were computed again."""
        return self._batch.num_prefilled_tokens

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        scoring = params.scoring
        script = make_score_script(len(prompt_ids), scoring) if scoring else self._author(prompt_ids, params, context)
        self._check_alive()
        if not script.token_ids:
            return self._completion(script, join_spans(self.model_name, (), self.version), 0)
        row = SimulatedRow(
            prompt=hash(tuple(prompt_ids)),
            prompt_tokens=len(prompt_ids),
            num_tokens=len(script.token_ids),
            priority=context.priority,
            trajectory_id=context.trajectory_id,
            listens=on_first_token is not ignore_first_token,
        )
        if not self._batch.can_ever_hold(row):
            raise EngineRefused(f"{row.prompt_tokens} + {row.num_tokens} tokens exceed the cache of the engine")
        pending = Pending(
            row=row,
            script=script,
            answer=asyncio.get_running_loop().create_future(),
            on_first_token=on_first_token,
        )
        self._pending[context.request_id] = self._by_row[row] = pending
        self._batch.add(row, self._worked_s())
        self._schedule()
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._end_early(pending)
            raise
        finally:
            if self._pending.get(context.request_id) is pending:
                del self._pending[context.request_id]

    async def abort(self, request_id: str) -> None:
        self._check_alive()
        if (pending := self._pending.get(request_id)) is not None:
            self._end_early(pending)

    async def pause(self) -> None:
        """Pause. The current step continues later where it stopped."""
        self._paused = True
        self._schedule()

    async def resume(self) -> None:
        self._paused = False
        self._schedule()

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        if not self._paused:
            raise RuntimeError("a push of weights may only begin on a paused engine")
        self._checksums = {}

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Only takes bytes within the bucket: on a virtual clock nothing may wait for other processes."""
        if not self._paused:
            raise RuntimeError("weights may only be loaded into a paused engine")
        if not isinstance(bucket.payload, InlineBytes):
            raise ValueError(f"sync.transport: a simulated engine takes object_store only, not {bucket.payload!r}")
        for tensor, data in zip(bucket.tensors, bucket.payload.data, strict=True):
            self._checksums[tensor.name] = checksum(data)

    async def commit_weights(self, version: int) -> WeightReceipt:
        self.version = version
        self._versions.append((self._batch.steps_by(self._worked_s()), version))
        self._batch.cache.forget()
        receipt = WeightReceipt(version=version, checksums=self._checksums)
        self._checksums = {}
        return receipt

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        self._check_alive()
        return (-1.0,) * (len(token_ids) - 1)

    def die(self, reason: str) -> None:
        """Fail every request from now on, and those in flight at once."""
        self._death = reason
        for pending in self._by_row.values():
            if not pending.answer.done():
                pending.answer.set_exception(EngineDied(reason))
        self._by_row.clear()
        self._schedule()

    def share_changed(self, share: float) -> None:
        """Called when more or fewer processes of the device are busy."""
        self._share = share
        if self._occupies:
            self._schedule()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _worked_s(self) -> float:
        return self._rate.measure_work_s(asyncio.get_running_loop().time())

    def _schedule(self) -> None:
        """Update the speed, and when the batch changes next."""
        loop = asyncio.get_running_loop()
        goes = self._death is None and not self._paused and not self._batch.empty
        self._occupy(goes)
        self._rate.set_rate(loop.time(), self._share if goes else 0.0)
        when_s = self._rate.when_s(self._batch.next_change_s())
        if self._timer is not None and self._timer_s != when_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and goes:
            self._timer, self._timer_s = loop.call_at(when_s, self._change), when_s

    def _occupy(self, goes: bool) -> None:
        if self._device is None or goes == self._occupies:
            return
        self._occupies = goes
        if goes:
            self._device.occupy(self)
        else:
            self._device.vacate(self)

    def _change(self) -> None:
        self._timer = None
        change = self._batch.change()
        for row in change.begun:
            if (pending := self._by_row.get(row)) is not None:
                pending.on_first_token()
        for row in change.finished:
            if (pending := self._by_row.pop(row, None)) is not None:
                self._answer(pending, row.num_tokens)
        self._schedule()

    # -- answers -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDied(self._death)

    def _end_early(self, pending: Pending) -> None:
        if self._by_row.pop(pending.row, None) is not None:
            self._answer(pending, self._batch.remove(pending.row, self._worked_s()))
            self._schedule()

    def _answer(self, pending: Pending, num_tokens: int) -> None:
        if not pending.answer.done():
            pending.answer.set_result(
                self._completion(
                    pending.script, self._spans(pending.row, num_tokens), num_tokens, pending.row.cached_tokens
                )
            )

    def _completion(
        self, script: Script, spans: tuple[VersionSpan, ...], num_tokens: int, cached_tokens: int = 0
    ) -> Completion:
        whole = num_tokens == len(script.token_ids)
        if script.scores is not None:
            spans, num_tokens = join_spans(self.model_name, (), spans[-1].version), 0
        return Completion(
            token_ids=script.token_ids if num_tokens == len(script.token_ids) else script.token_ids[:num_tokens],
            logprobs=minus_ones(num_tokens),
            text=script.text if whole else "",
            finish_reason=script.finish_reason if whole else "abort",
            versions=spans,
            cached_tokens=cached_tokens,
            scores=script.scores if whole else None,
        )

    def _spans(self, row: SimulatedRow, num_tokens: int) -> tuple[VersionSpan, ...]:
        """The version that sampled each token, by the steps in which the row was in the batch."""
        return join_spans(self.model_name, self._stretches(row, num_tokens), self.version)

    def _stretches(self, row: SimulatedRow, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        start = 0
        for joined, left in row.stays:
            first = bisect_right(self._versions, joined, key=lambda change: change[0]) - 1
            for index in range(first, len(self._versions)):
                until = self._versions[index + 1][0] if index + 1 < len(self._versions) else left
                end = min(start + min(until, left) - joined, num_tokens)
                yield self._versions[index][1], start, end
                start, joined = max(start, end), min(until, left)
                if joined >= left:
                    break


def rows_apart(tokens_per_s: float) -> EngineSpeed:
    """A speed with the same rate for every row, however many there are."""
    return EngineSpeed(step_s=1 / tokens_per_s, row_s=0.0, cached_token_s=0.0, prefill_token_s=0.0, max_rows=1 << 30)


def make_score_script(num_tokens: int, scoring: PromptScoring) -> Script:
    """The scores of a prompt of this length: every token, and every likely one in its place, has log-prob -1."""
    num_scored, top_k = num_tokens - scoring.start, scoring.top_k
    scores = TokenScores(
        logprobs_N=np.full(num_scored, -1.0, np.float32),
        top_ids_NK=np.zeros((num_scored, top_k), np.int32) if top_k else None,
        top_logprobs_NK=np.full((num_scored, top_k), -1.0, np.float32) if top_k else None,
    )
    return Script(token_ids=(0,), text="", scores=scores)


@lru_cache(maxsize=1 << 14)
def minus_ones(count: int) -> tuple[float, ...]:
    """Shared by all completions of a length: otherwise 100 000 in flight would not fit."""
    return (-1.0,) * count
