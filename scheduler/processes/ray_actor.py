"""One process under Ray: calling it, ending it, and why it died."""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from grmpipe.models.import_path import put_working_folder_last, worker_setup
from grmpipe.models.types import WeightBucket
from grmpipe.scheduler.placement import Seat
from grmpipe.scheduler.processes.actors import ActorDied, Closable, MemberFactory, ask_member, free_port
from grmpipe.scheduler.processes.call_limits import MEMBER_CALL, CallLimits
from grmpipe.scheduler.processes.call_order import OrderedHost
from grmpipe.scheduler.processes.node_address import node_address
from grmpipe.scheduler.processes.rpc import NetworkLine, RpcClient, RpcDisconnected, RpcServer, socket_path
from grmpipe.scheduler.processes.wire_types import Dialect, UntypedCall
from grmpipe.scheduler.run_together import RemoteTraceback

log = logging.getLogger(__name__)

T = TypeVar("T")
LOG_LINES = 8  # a dead process's last ones, in its report
CAUSE_GRACE_S = 2.0  # a dead rank makes its peers fail first: wait for the death itself
ENDED = "the run ended its process"
CLOSE_TIMEOUT_S = 5.0  # for members and engines to end what they started, before they are killed


class MemberHost(OrderedHost):
    """An actor that holds one member of a group. All that is asked of the member is done on one thread, in the order of
    asking: ranks that are asked the same things meet in the same collectives. Its `async` methods run on the actor's
    event loop instead, where calls overlap."""

    def __init__(self) -> None:
        super().__init__()
        put_working_folder_last()  # Ray puts it first
        self._member: object = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="member")

    async def process_id(self) -> int:
        return os.getpid()

    async def open_rpc(self, path: str) -> Dialect | None:
        """Like EngineHost.open_rpc, for calls of the member. None if the types of a method are unknown: then calls go
        over Ray.
        """
        if (dialect := self._make_line()) is not None:
            await self._line.listen(path)
        return dialect

    async def open_network_rpc(self, key: bytes) -> NetworkLine | None:
        """The same for a caller on another machine that has the key."""
        if (dialect := self._make_line()) is None:
            return None
        return NetworkLine(dialect, host := node_address(), await self._line.listen_to_network(host, key))

    def _make_line(self) -> Dialect | None:
        try:
            dialect = Dialect.of(type(self._member)).under(MEMBER_CALL)
        except UntypedCall as error:
            log.warning("calls go by Ray: %s", error)
            return None
        self._line = RpcServer(lambda method, *args: self.ask(method.removeprefix(f"{MEMBER_CALL}."), *args), dialect)
        return dialect

    async def node_address(self) -> str:
        return node_address()

    async def free_port(self, host: str) -> int:
        return free_port(host)

    async def make(self, make_member: MemberFactory, rank: int, world_size: int, init_method: str | None) -> None:
        self._member = await self._on_thread(lambda: make_member(rank, world_size, init_method))

    async def ask(self, method: str, *args: object) -> object:
        return await ask_member(self._thread, self._member, method, *args)

    async def close(self) -> None:
        if isinstance(self._member, Closable):
            await self.ask("close")

    async def _on_thread(self, work: Callable[[], object]) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def define_actor(host: type[OrderedHost]) -> type:
    """The actor's class around a host. Like any class within a function it is sent by value: the host's module is
    imported only once the process finds our packages.
    """
    set_up, module, name = worker_setup(), host.__module__, host.__name__

    class Sent:
        def __init__(self) -> None:
            import importlib

            set_up()
            importlib.import_module("grmpipe.scheduler.processes.process_signals").leave_to_driver()
            self._host: OrderedHost = vars(importlib.import_module(module))[name]()

        async def call_in_order(self, number: int, method: str, *args: object) -> object:
            return await self._host.call_in_order(number, method, *args)

    Sent.__name__ = Sent.__qualname__ = name  # in process titles and errors
    return Sent


class BucketStore:
    """Puts a bucket into the object store once, for all engines that take it."""

    def __init__(self) -> None:
        self._last: tuple[WeightBucket, object] | None = None

    def put(self, bucket: WeightBucket) -> object:
        if self._last is None or self._last[0] is not bucket:
            self._last = (bucket, ray.put(bucket))
        return self._last[1]


class RayActor:
    """One actor on its seat: calls it, and reports why it died."""

    def __init__(self, seat: Seat, handle: ActorHandle[Any], store: BucketStore, limits: CallLimits) -> None:
        self.name = seat.name
        self._limits = limits
        self.process_id = 0
        self._handle = handle
        self._store = store
        self._line: RpcClient | None = None
        self._num_asked = 0  # by Ray
        self._death: str | None = None  # why; from then on Ray is asked nothing of it, for Ray itself may be gone

    async def open_rpc(self, *, same_machine: bool) -> None:
        """Use a channel of its own instead of Ray for further calls. Ray's own stays where it is the encrypted one."""
        try:
            if same_machine:
                with socket_path() as path:
                    dialect = cast("Dialect | None", await self._call_by_ray("open_rpc", path))
                    if dialect is not None:
                        self._line = await RpcClient.connect(path, self.name, dialect)
            elif not encrypts():
                key = secrets.token_bytes()
                line = cast("NetworkLine | None", await self._call_by_ray("open_network_rpc", key))
                if line is not None:
                    self._line = await RpcClient.connect_over_network(
                        line.host, line.port, key, self.name, line.dialect
                    )
        except OSError as error:
            log.warning("%s: calls use Ray, since there is no connection of its own: %s", self.name, error)

    async def call(self, method: str, *args: object) -> object:
        """Call a method. Raises the method's error, or ActorDied. A process that doesn't answer in time is killed and
        counts as dead.
        """
        try:
            async with asyncio.timeout(self._limits.of(method, args)) as limit:
                return await self._call(method, *args)
        except TimeoutError:
            if not limit.expired():
                raise
            self.kill(self._limits.words(method, args))
            raise ActorDied(self.name, str(self._death)) from None

    async def _call(self, method: str, *args: object) -> object:
        if self._death is not None:
            raise ActorDied(self.name, self._death)
        if self._line is None or any(isinstance(arg, ray.ObjectRef) for arg in args):  # only Ray can fetch those
            return await self._call_by_ray(method, *args)
        name, rest = (f"{method}.{args[0]}", args[1:]) if method == MEMBER_CALL else (method, args)
        if not self._line.carries(name):
            return await self._call_by_ray(method, *args)
        try:
            return await self._line.call(name, *rest)
        except RpcDisconnected:
            if self._death is None:
                await self._call_by_ray("process_id")  # raises ActorDied with the cause if the process is gone
                self.kill("its process was alive, but the connection to it broke")
            raise ActorDied(self.name, str(self._death)) from None

    async def _call_by_ray(self, method: str, *args: object) -> object:
        try:
            answer: Awaitable[object] = self._handle.call_in_order.remote(self._num_asked, method, *args)
            self._num_asked += 1  # not if the arguments can't be sent: that call never reaches the process
            return await answer
        except RayTaskError as error:
            raise error.cause from RemoteTraceback(self.name, str(error))
        except RayActorError as error:
            self.kill(self._reason(error))  # a process that can't be reached must not come back
            raise ActorDied(self.name, str(self._death)) from None

    def share(self, bucket: WeightBucket) -> object:
        return self._store.put(bucket)

    async def wait_until_up(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                self.process_id = cast(int, await self.call("process_id"))
        except TimeoutError:
            raise TimeoutError(
                f"{self.name}: its process did not start within {timeout_s:.0f} s; "
                "set cluster.start_timeout_s higher if this machine is slow"
            ) from None
        log.info("%s runs in process %d", self.name, self.process_id)

    async def close(self) -> None:
        """End it in order if it can be reached, otherwise at once."""
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.call("close")
        self.kill()

    def kill(self, why: str = ENDED) -> None:
        """Kill it, once. Ray kills its process group, including all it started."""
        if self._death is not None:
            return
        self._death = why
        if self._line is not None:
            self._line.close()
        ray.kill(self._handle, no_restart=True)

    def _reason(self, error: RayActorError) -> str:
        """Ray's cause, then the last lines of the process's log if that is on this machine."""
        message = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        # Ray's text has ids before the detail and general advice after it.
        detail = message.partition("Worker exit detail: ")[2].partition("Some common causes")[0].strip() or message
        lines = _last_lines(self.process_id)
        tail = "".join(f"\n  | {line}" for line in lines) or " none"
        return f"process {self.process_id} is gone (killed, out of memory, or crashed). Ray: {detail} Last lines:{tail}"


def encrypts() -> bool:
    """Whether Ray encrypts what its processes send each other, which a channel of our own would not."""
    return os.environ.get("RAY_USE_TLS", "0") == "1"


async def first_cause(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All answers in order, or the first failure; a death right after it counts as the first."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in done if task.exception() is not None]
        if failed and pending:
            await asyncio.wait(pending, timeout=CAUSE_GRACE_S)
            failed += [task for task in pending if task.done() and task.exception() is not None]
        failed.sort(key=lambda task: not isinstance(task.exception(), ActorDied))
        return [task.result() for task in failed or tasks]
    finally:
        for task in tasks:
            task.cancel()


def _last_lines(process_id: int) -> list[str]:
    """The end of a worker's stderr; empty for a process of another machine."""
    node = ray._private.worker.global_worker.node
    if node is None:
        return []
    for path in Path(node.get_logs_dir_path()).glob(f"worker-*-{process_id}.err"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip() and not line.startswith(":")][-LOG_LINES:]
    return []
