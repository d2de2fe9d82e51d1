"""The far end of a RemoteEngine: serves any Engine to another process, in batches."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

import msgspec

from grmpipe.models.adapter_view import AdapterView
from grmpipe.models.import_path import put_working_folder_last
from grmpipe.models.types import (
    Broadcast,
    Completion,
    DescribesStart,
    Engine,
    EngineDied,
    EngineRefused,
    GroupLink,
    KeepsTrajectories,
    RequestContext,
    SamplingParams,
    ServesAdapters,
    Sleeper,
    WeightBucket,
    WeightPush,
    WeightReceipt,
    WeightTensor,
)
from grmpipe.scheduler.processes.actors import Closable, EngineFactory
from grmpipe.scheduler.processes.call_order import OrderedHost
from grmpipe.scheduler.processes.node_address import node_address
from grmpipe.scheduler.processes.rpc import NetworkLine, RpcServer
from grmpipe.scheduler.processes.wire_types import Dialect, RemoteError, rebuild_error, remote_error

NOT_BY_SOCKET = ("start", "open_rpc", "open_network_rpc", "call_in_order")
# Errors of an engine that callers distinguish; any other arrives as a RuntimeError with its traceback.
ENGINE_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (EngineDied, EngineRefused, ValueError, ConnectionError)
}
COLLECT_S = 20.0  # without news; a caller that hears nothing for longer knows that this process hangs


Headers = tuple[tuple[WeightTensor, ...], ...]  # the tensors of each bucket


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of `generate`. The ticket identifies the call; a request_id may come twice."""

    ticket: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    context: RequestContext


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel a call whose caller is gone."""

    ticket: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request; its call is answered with the tokens so far."""

    request_id: str


class EndTrajectory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No further turn of a trajectory comes."""

    trajectory_id: str


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    ticket: int


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    ticket: int
    completion: Completion


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    ticket: int
    error: RemoteError


Message = EngineRequest | Cancel | Abort | EndTrajectory
Notice = FirstToken | Finished | Failure


def encode_headers(buckets: Headers) -> bytes:
    return msgspec.msgpack.encode(buckets)


async def receive_weights(engine: Engine, push: WeightPush, is_current: Callable[[], bool]) -> WeightReceipt:
    """Take a whole push into an engine: join its group, load every bucket, commit. It ends between two buckets once it
    isn't current any more. Raises like the engine's own methods.
    """
    await engine.begin_weights(push.link)
    for tensors in msgspec.msgpack.decode(push.headers, type=Headers):
        if not is_current():
            break
        await engine.load_bucket(WeightBucket(tensors=tensors, payload=Broadcast()))
    if not is_current():
        raise ConnectionError(f"weights: the push of version {push.version} was given up, and another one began")
    return await engine.commit_weights(push.version)


class EngineHost(OrderedHost):
    """An async actor: every method runs on one event loop, so that no control call queues behind `collect`."""

    def __init__(self) -> None:
        super().__init__()
        put_working_folder_last()  # Ray puts it first
        self._engine: Engine | None = None
        self._push: WeightPush | None = None  # the last one by broadcasts
        self._running: dict[int, asyncio.Task[None]] = {}
        self._notices: list[Notice] = []
        self._news = asyncio.Event()
        self._dialect = replace(Dialect.of(EngineHost, but=NOT_BY_SOCKET), errors=ENGINE_ERRORS)
        self._line = RpcServer(lambda method, *args: getattr(self, method)(*args), self._dialect)

    async def call_in_order(self, number: int, method: str, *args: object) -> object:
        """An error leaves as one that is known at the other end: others may not be picklable."""
        try:
            return await super().call_in_order(number, method, *args)
        except Exception as error:
            raise rebuild_error(remote_error(error, ENGINE_ERRORS), ENGINE_ERRORS) from error

    async def process_id(self) -> int:
        return os.getpid()

    async def open_rpc(self, path: str) -> Dialect:
        """Open a direct channel for these calls, besides the actor's: a socket at this path, for one connection.
        Returns its dialect.
        """
        await self._line.listen(path)
        return self._dialect

    async def open_network_rpc(self, key: bytes) -> NetworkLine:
        """The same for a caller on another machine that has the key."""
        return NetworkLine(self._dialect, host := node_address(), await self._line.listen_to_network(host, key))

    async def start(self, make_engine: EngineFactory, rank: int) -> str:
        """Start the engine. Blocks the loop while the model loads: no other call comes before. Returns what its start
        found.
        """
        engine = self._engine = make_engine(rank)
        return engine.describe_start() if isinstance(engine, DescribesStart) else ""

    async def close(self) -> None:
        """Let the engine end its threads, processes and servers."""
        engine, self._engine = self._engine, None
        if isinstance(engine, Closable):
            engine.close()

    async def deliver(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, EngineRequest):
                self._take_on(message)
            elif isinstance(message, Abort):
                await asyncio.sleep(0)  # a request of the same batch must have reached the engine
                await self.engine.abort(message.request_id)
            elif isinstance(message, EndTrajectory):
                await asyncio.sleep(0)  # a cancelled request of the same batch must have left the engine
                if isinstance(self.engine, KeepsTrajectories):
                    self.engine.end_trajectory(message.trajectory_id)
            elif message.ticket in self._running:
                self._running[message.ticket].cancel()

    async def collect(self) -> list[Notice]:
        """Wait for news, then return all of it; empty if none comes for COLLECT_S. One collector at a time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(COLLECT_S):
                await self._news.wait()
        self._news.clear()
        notices, self._notices = self._notices, []
        return notices

    async def pause(self, adapter: str = "") -> None:
        await self._serving(adapter).pause()

    async def resume(self, adapter: str = "") -> None:
        await self._serving(adapter).resume()

    async def receive_weights(self, push: WeightPush) -> WeightReceipt:
        self._push = push
        return await receive_weights(self.engine, push, lambda: self._push is push)

    async def begin_weights(self, link: GroupLink | None, adapter: str = "") -> None:
        if not adapter:
            self._push = None
        await self._serving(adapter).begin_weights(link)

    async def load_bucket(self, bucket: WeightBucket, adapter: str = "") -> None:
        await self._serving(adapter).load_bucket(bucket)

    async def commit_weights(self, version: int, adapter: str = "") -> WeightReceipt:
        return await self._serving(adapter).commit_weights(version)

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> tuple[float, ...]:
        return await self._serving(adapter).score(token_ids)

    async def sleep(self) -> int:
        return await cast(Sleeper, self.engine).sleep()

    async def wake(self) -> None:
        await cast(Sleeper, self.engine).wake()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "call start first"
        return self._engine

    def _serving(self, adapter: str) -> Engine:
        """The engine, or one of its adapters."""
        return AdapterView(cast(ServesAdapters, self.engine), adapter) if adapter else self.engine

    def _take_on(self, request: EngineRequest) -> None:
        task = asyncio.create_task(self._answer(request))
        self._running[request.ticket] = task
        task.add_done_callback(lambda _: self._running.pop(request.ticket))  # also called for a task that never began

    async def _answer(self, request: EngineRequest) -> None:
        ticket = request.ticket
        try:
            completion = await self.engine.generate(
                request.prompt_ids, request.params, request.context, lambda: self._notify(FirstToken(ticket=ticket))
            )
            self._notify(Finished(ticket=ticket, completion=completion))
        except Exception as error:
            self._notify(Failure(ticket=ticket, error=remote_error(error, ENGINE_ERRORS)))

    def _notify(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._news.set()
