"""An engine in another process, as an Engine: calls of one tick are sent together."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from grmpipe.models.types import (
    Completion,
    EngineDied,
    GroupLink,
    RequestContext,
    SamplingParams,
    SmallPayload,
    WeightBucket,
    WeightPush,
    WeightReceipt,
    ignore_first_token,
)
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.processes.engine_host import (
    ENGINE_ERRORS,
    Abort,
    Cancel,
    EndTrajectory,
    EngineRequest,
    Finished,
    FirstToken,
    Message,
    Notice,
)
from grmpipe.scheduler.processes.wire_types import rebuild_error


class Host(Protocol):
    """The channel to an EngineHost. Raises the method's error, or ActorDied."""

    async def call(self, method: str, *args: object) -> object: ...

    def share(self, bucket: WeightBucket) -> object:
        """The object to send instead of a bucket: several engines take the same one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteCall:
    """A call of `generate` that waits for its answer."""

    answer: asyncio.Future[Completion]
    on_first_token: Callable[[], None]


class RemoteEngine:
    """Sends one batch at a time, and keeps one `collect` outstanding while any call waits."""

    def __init__(self, host: Host, started: str = "") -> None:
        """started: what its start found."""
        self._host = host
        self._started = started
        self._tickets = itertools.count()
        self._waiting: dict[int, _RemoteCall] = {}
        self._outbox: list[Message] = []
        self._sender: asyncio.Task[None] | None = None
        self._collector: asyncio.Task[None] | None = None
        self._death: str | None = None

    def describe_start(self) -> str:
        return self._started

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        self._check_alive()
        ticket = next(self._tickets)
        call = _RemoteCall(answer=asyncio.get_running_loop().create_future(), on_first_token=on_first_token)
        self._waiting[ticket] = call
        self._post(EngineRequest(ticket=ticket, prompt_ids=tuple(prompt_ids), params=params, context=context))
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._post(Cancel(ticket=ticket))
            raise
        finally:
            self._waiting.pop(ticket, None)

    async def abort(self, request_id: str) -> None:
        self._check_alive()
        await asyncio.shield(self._post(Abort(request_id=request_id)))
        self._check_alive()

    def end_trajectory(self, trajectory_id: str) -> None:
        if self._death is None:
            self._post(EndTrajectory(trajectory_id=trajectory_id))

    async def pause(self, adapter: str = "") -> None:
        await self._control("pause", adapter)

    async def resume(self, adapter: str = "") -> None:
        await self._control("resume", adapter)

    async def receive_weights(self, push: WeightPush) -> WeightReceipt:
        """Take a whole push by broadcasts, in one call: buckets don't pass this process."""
        return cast(WeightReceipt, await self._control("receive_weights", push))

    async def begin_weights(self, link: GroupLink | None = None, adapter: str = "") -> None:
        await self._control("begin_weights", link, adapter)

    async def load_bucket(self, bucket: WeightBucket, adapter: str = "") -> None:
        small = isinstance(bucket.payload, SmallPayload)
        await self._control("load_bucket", bucket if small else self._host.share(bucket), adapter)

    async def commit_weights(self, version: int, adapter: str = "") -> WeightReceipt:
        return cast(WeightReceipt, await self._control("commit_weights", version, adapter))

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> tuple[float, ...]:
        return cast("tuple[float, ...]", await self._control("score", tuple(token_ids), adapter))

    async def sleep(self) -> int:
        return cast(int, await self._control("sleep"))

    async def wake(self) -> None:
        await self._control("wake")

    async def _control(self, method: str, *args: object) -> object:
        self._check_alive()
        try:
            return await self._host.call(method, *args)
        except ActorDied as death:
            self._fail_all(death)
            raise EngineDied(death.reason) from death

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDied(self._death)

    def _post(self, message: Message) -> asyncio.Task[None]:
        """Queue a message. The sender runs after all other tasks of this tick have posted theirs."""
        self._outbox.append(message)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return self._sender

    async def _send(self) -> None:
        """Send one batch after the other: an abort never overtakes its request."""
        try:
            while self._outbox and self._death is None:
                batch, self._outbox = self._outbox, []
                await self._host.call("deliver", batch)
        except Exception as error:
            self._fail_all(error)

    async def _collect(self) -> None:
        try:
            while self._waiting and self._death is None:
                for notice in cast("list[Notice]", await self._host.call("collect")):
                    self._dispatch(notice)
        except Exception as error:
            self._fail_all(error)

    def _dispatch(self, notice: Notice) -> None:
        call = self._waiting.get(notice.ticket)
        if call is None or call.answer.done():
            return  # cancelled while the answer was on its way
        if isinstance(notice, FirstToken):
            call.on_first_token()
        elif isinstance(notice, Finished):
            call.answer.set_result(notice.completion)
        else:
            call.answer.set_exception(rebuild_error(notice.error, ENGINE_ERRORS))

    def _fail_all(self, error: Exception) -> None:
        """Fail all waiting calls, each with its own exception."""
        if isinstance(error, ActorDied):
            self._death = error.reason
        elif isinstance(error, EngineDied):  # the process is alive, but not its engine
            self._death = str(error)
        for call in self._waiting.values():
            if not call.answer.done():
                call.answer.set_exception(EngineDied(self._death) if self._death is not None else error)
