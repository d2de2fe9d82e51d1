"""An engine that only takes time: scripted answers at a given speed, by the loop's clock. For tests and simulation.

Everything else is real: requests are kept over a pause, versions go to spans, received weights are hashed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from models.checksums import checksum
from models.types import (
    Completion,
    EngineDied,
    FinishReason,
    GroupLink,
    InlineBytes,
    RequestContext,
    SamplingParams,
    VersionSpan,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One scripted answer: its ids and text, and how long before its first token."""

    token_ids: tuple[int, ...]
    text: str
    delay_s: float = 0.0
    finish_reason: FinishReason = "stop"


Author = Callable[[Sequence[int], SamplingParams, RequestContext], Script]


class SimulatedEngine:
    """Answers by `author`, each row at `tokens_per_s`. Every token's log-prob is -1."""

    def __init__(self, model_name: str, author: Author, *, tokens_per_s: float = 1e4, version: int = 0) -> None:
        self.model_name = model_name
        self.version = version
        self._author = author
        self._tokens_per_s = tokens_per_s
        self._going = asyncio.Event()
        self._going.set()
        self._pausing = asyncio.Event()
        self._aborted: dict[str, asyncio.Event] = {}
        self._checksums: dict[str, str] = {}
        self._death: str | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        script = self._author(prompt_ids, params, context)
        self._aborted[context.request_id] = asyncio.Event()
        try:
            await asyncio.sleep(script.delay_s)
            await self._alive_and_going()
            on_first_token()
            spans = await self._decode(len(script.token_ids), self._aborted[context.request_id])
        finally:
            del self._aborted[context.request_id]
        num_tokens = spans[-1].end
        whole = num_tokens == len(script.token_ids)
        return Completion(
            token_ids=script.token_ids[:num_tokens],
            logprobs=(-1.0,) * num_tokens,
            text=script.text if whole else "",
            finish_reason=script.finish_reason if whole else "abort",
            versions=tuple(spans),
        )

    async def abort(self, request_id: str) -> None:
        if self._death is not None:
            raise EngineDied(self._death)
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def pause(self) -> None:
        self._going.clear()
        self._pausing.set()

    async def resume(self) -> None:
        self._pausing.clear()
        self._going.set()

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        if self._going.is_set():
            raise RuntimeError("a push of weights may only begin on a paused engine")
        self._checksums = {}

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Takes bytes within the bucket only: on a virtual clock nothing may wait for other processes."""
        if self._going.is_set():
            raise RuntimeError("weights may only be loaded into a paused engine")
        if not isinstance(bucket.payload, InlineBytes):
            raise ValueError(f"sync.transport: a simulated engine takes object_store only, not {bucket.payload!r}")
        for tensor, data in zip(bucket.tensors, bucket.payload.data, strict=True):
            self._checksums[tensor.name] = checksum(data)

    async def commit_weights(self, version: int) -> WeightReceipt:
        self.version = version
        receipt = WeightReceipt(version=version, checksums=self._checksums)
        self._checksums = {}
        return receipt

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return (-1.0,) * (len(token_ids) - 1)

    def die(self, reason: str) -> None:
        """From now on every request fails, those in flight at their next wait."""
        self._death = reason
        self._pausing.set()
        self._going.set()

    async def _alive_and_going(self) -> None:
        await self._going.wait()
        if self._death is not None:
            raise EngineDied(self._death)

    async def _decode(self, num_tokens: int, aborted: asyncio.Event) -> list[VersionSpan]:
        """Spend the time of `num_tokens` tokens, over pauses; a span per stretch under one version."""
        loop = asyncio.get_running_loop()
        spans: list[VersionSpan] = []
        done = 0
        while done < num_tokens and not aborted.is_set():
            await self._alive_and_going()
            start, begun_at, version = done, loop.time(), self.version
            await self._interrupted_sleep((num_tokens - done) / self._tokens_per_s, aborted)
            sampled = round((loop.time() - begun_at) * self._tokens_per_s)
            done = min(num_tokens, start + max(sampled, 1))
            if spans and spans[-1].version == version:
                start = spans.pop().start
            spans.append(VersionSpan(model=self.model_name, version=version, start=start, end=done))
        return spans or [VersionSpan(model=self.model_name, version=self.version, start=0, end=0)]

    async def _interrupted_sleep(self, seconds: float, aborted: asyncio.Event) -> None:
        """Sleep, but wake on a pause, an abort or death."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._pausing, aborted)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
