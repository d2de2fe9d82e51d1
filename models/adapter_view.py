"""One adapter of an engine as an engine of its own: requests and pushes that name it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from grmpipe.models.types import (
    Completion,
    GroupLink,
    KeepsTrajectories,
    RequestContext,
    SamplingParams,
    ServesAdapters,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)


class AdapterView:
    """An Engine for one model of an engine that serves several. It has no life of its own: they die together.

    Its requests have ids of their own there: the same question to two models is two requests.
    """

    def __init__(self, engine: ServesAdapters, adapter: str) -> None:
        self._engine, self._adapter = engine, adapter

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        own = replace(context, adapter=self._adapter, request_id=self._name_request(context.request_id))
        return await self._engine.generate(prompt_ids, params, own, on_first_token)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(self._name_request(request_id))

    def _name_request(self, request_id: str) -> str:
        return f"{self._adapter}/{request_id}"

    def end_trajectory(self, trajectory_id: str) -> None:
        if isinstance(self._engine, KeepsTrajectories):
            self._engine.end_trajectory(trajectory_id)

    async def pause(self) -> None:
        await self._engine.pause(self._adapter)

    async def resume(self) -> None:
        await self._engine.resume(self._adapter)

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        await self._engine.begin_weights(link, self._adapter)

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._engine.load_bucket(bucket, self._adapter)

    async def commit_weights(self, version: int) -> WeightReceipt:
        return await self._engine.commit_weights(version, self._adapter)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return await self._engine.score(token_ids, self._adapter)
