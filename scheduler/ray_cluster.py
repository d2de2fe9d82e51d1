"""Ray: pools as placement groups, roles as actors in them, deaths with their cause. The only file that calls Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import operator
import os
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import AuthenticationError, RayActorError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from models.types import Engine, WeightBucket
from scheduler.actors import LOOPBACK, ActorDied, ActorGroup, Closable, EngineFactory, MemberFactory, free_port
from scheduler.engine_host import EngineHost
from scheduler.placement import ClusterConfig, NodeCapacity, Placement, Seat, check_capacity
from scheduler.remote_engine import RemoteEngine

log = logging.getLogger(__name__)

T = TypeVar("T")
LOG_LINES = 8  # of a dead process, in its report
CAUSE_GRACE_S = 2.0  # a dead rank makes its peers fail first: wait for the death itself
CLOSE_TIMEOUT_S = 5.0  # for members and engines to end what they started; then they are killed


class _RemoteTraceback(Exception):
    """Where in the other process an error was raised; hangs below the error itself."""


class MemberHost:
    """An actor that holds one member of a group."""

    def __init__(self) -> None:
        self._member: object = None

    def process_id(self) -> int:
        return os.getpid()

    def node_address(self) -> str:
        return ray.util.get_node_ip_address()

    def free_port(self, host: str) -> int:
        return free_port(host)

    def make(self, make_member: MemberFactory, rank: int, world_size: int, init_method: str | None) -> None:
        self._member = make_member(rank, world_size, init_method)

    def ask(self, method: str, *args: object) -> object:
        return operator.methodcaller(method, *args)(self._member)

    def close(self) -> None:
        if isinstance(self._member, Closable):
            self._member.close()


class BucketStore:
    """Puts a bucket into the object store once, however many engines take it one after another."""

    def __init__(self) -> None:
        self._last: tuple[WeightBucket, object] | None = None

    def put(self, bucket: WeightBucket) -> object:
        if self._last is None or self._last[0] is not bucket:
            self._last = (bucket, ray.put(bucket))
        return self._last[1]


class RayActor:
    """One actor on its seat: calls it, and says why it died."""

    def __init__(self, seat: Seat, handle: ActorHandle, store: BucketStore) -> None:
        self.name = seat.name
        self.process_id = 0
        self._handle = handle
        self._store = store

    async def call(self, method: str, *args: object) -> object:
        try:
            return await getattr(self._handle, method).remote(*args)
        except RayTaskError as error:
            raise error.cause from _RemoteTraceback(f"in {self.name}:\n{error}")
        except RayActorError as error:
            self.kill()  # what can't be reached must not come back
            raise ActorDied(self.name, self._reason(error)) from None

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
        """End it in good order where it can be had, else at once."""
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.call("close")
        self.kill()

    def kill(self) -> None:
        """Ray ends its process group: whatever it started goes with it."""
        ray.kill(self._handle, no_restart=True)

    def _reason(self, error: RayActorError) -> str:
        """Ray's own cause, then the last lines of the process if its log lies on this machine."""
        told = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        # Ray's text wraps the detail in ids before it and general advice after it.
        detail = told.partition("Worker exit detail: ")[2].partition("Some common causes")[0].strip() or told
        lines = _last_lines(self.process_id)
        tail = "".join(f"\n  | {line}" for line in lines) or " none"
        return f"process {self.process_id} is gone (killed, out of memory, or crashed). Ray: {detail} Last lines:{tail}"


class RayGroup:
    """Members of one class, a process each."""

    def __init__(self, actors: Sequence[RayActor]) -> None:
        self._actors = actors

    @property
    def size(self) -> int:
        return len(self._actors)

    async def call(self, rank: int, method: str, *args: object) -> object:
        return await self._actors[rank].call("ask", method, *args)

    async def call_all(self, method: str, *args: object) -> list[object]:
        return await self.call_each(method, [args] * self.size)

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        assert len(args_by_rank) == self.size, f"{len(args_by_rank)} arguments for {self.size} ranks"
        return await _first_cause(
            [actor.call("ask", method, *args) for actor, args in zip(self._actors, args_by_rank, strict=True)]
        )

    async def close(self) -> None:
        for actor in self._actors:
            actor.kill()


class RayCluster:
    """The pools of a placement, reserved. Ends the Ray that it started itself, and only that."""

    def __init__(self, config: ClusterConfig, placement: Placement, owns_ray: bool) -> None:
        self._config = config
        self._placement = placement
        self._owns_ray = owns_ray
        self._pools: dict[str, PlacementGroup] = {}
        self._groups: dict[str, list[RayActor]] = {}
        self._engines: dict[str, RayActor] = {}
        self._factories: dict[str, EngineFactory] = {}
        self._num_restarts = 0
        self._store = BucketStore()

    @classmethod
    async def start(cls, config: ClusterConfig, placement: Placement) -> RayCluster:
        """Start or join Ray and reserve the pools; what can't be had is a ValueError before anything is reserved."""
        owns_ray = not ray.is_initialized()
        if owns_ray:
            # Not in another thread, though it blocks for seconds: Ray's servers die with the thread that started them.
            _init_ray(config)
        cluster = cls(config, placement, owns_ray)
        try:
            check_capacity(placement, nodes_of_ray())
            await asyncio.to_thread(cluster._reserve_pools)
        except BaseException:
            await cluster.shutdown()
            raise
        return cluster

    async def start_group(self, role: str, make_member: MemberFactory) -> ActorGroup:
        actors = [self._create(seat, MemberHost, max_concurrency=1) for seat in self._placement.seats[role]]
        self._groups[role] = actors
        await self._until_up(actors)
        init_method = await _meeting_place(actors) if len(actors) > 1 else None
        await _first_cause(
            [actor.call("make", make_member, rank, len(actors), init_method) for rank, actor in enumerate(actors)]
        )
        return RayGroup(actors)

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        self._factories[role] = make_engine
        engines = await _first_cause([self._start_engine(seat) for seat in self._placement.seats[role]])
        return {seat.name: engine for seat, engine in zip(self._placement.seats[role], engines, strict=True)}

    async def restart_engine(self, role: str, name: str) -> Engine:
        (seat,) = (seat for seat in self._placement.seats[role] if seat.name == name)
        self._engines[name].kill()
        self._num_restarts += 1
        return await self._start_engine(seat)

    def machines(self, role: str) -> frozenset[str]:
        found: set[str] = set()
        for seat in self._placement.seats[role]:
            nodes = placement_group_table(self._pools[seat.pool])["bundles_to_node_id"]
            found.add(nodes[self._bundle(seat)])
        return frozenset(found)

    async def free_address(self, role: str) -> tuple[str, int]:
        everywhere = {machine for other in self._placement.seats for machine in self.machines(other)}
        return await _free_address(self._groups[role][0], LOOPBACK if len(everywhere) == 1 else None)

    async def shutdown(self) -> None:
        actors = [*self._engines.values(), *(actor for group in self._groups.values() for actor in group)]
        await asyncio.gather(*(actor.close() for actor in actors))
        for pool in self._pools.values():
            remove_placement_group(pool)
        if self._owns_ray:
            ray.shutdown()

    def _reserve_pools(self) -> None:
        for name, pool in self._placement.pools.items():
            bundles = [{pool.resource.upper(): float(len(slots))} for slots in self._placement.bundles(name)]
            self._pools[name] = placement_group(bundles, strategy=pool.strategy)
        for name, group in self._pools.items():
            if not group.wait(self._config.start_timeout_s):
                raise ValueError(
                    f"placement.pools.{name}: its {self._placement.pools[name].slots} "
                    f"{self._placement.pools[name].resource} slots did not become free within "
                    f"{self._config.start_timeout_s:.0f} s (free now: {_free_now()}); another job holds the rest: "
                    f"wait for it, or set placement.pools.{name}.slots lower"
                )

    async def _start_engine(self, seat: Seat) -> Engine:
        # Many calls at once: a control call must find its way past `collect`.
        actor = self._engines[seat.name] = self._create(seat, EngineHost, max_concurrency=1000)
        await self._until_up([actor])
        await actor.call("start", self._factories[seat.role], seat.rank)
        return RemoteEngine(actor)

    async def _until_up(self, actors: Sequence[RayActor]) -> None:
        await _first_cause([actor.wait_until_up(self._config.start_timeout_s) for actor in actors])

    def _bundle(self, seat: Seat) -> int:
        return self._placement.bundles(seat.pool).index(seat.slots)

    def _create(self, seat: Seat, host: type, max_concurrency: int) -> RayActor:
        """A process on its seat. Ray itself caps the threads of one that has a core or less."""
        amount = len(seat.slots) if seat.share == 1 else math.floor(seat.share * 1e4) / 1e4  # Ray counts in 1e-4
        on_gpu = self._placement.pools[seat.pool].resource == "gpu"
        # The name of a process that was killed just now may still be taken.
        name = f"{seat.name} ({self._num_restarts})" if self._num_restarts else seat.name
        handle = cast(
            ActorHandle,
            ray.remote(host)
            .options(
                name=name,
                num_cpus=0 if on_gpu else amount,
                num_gpus=amount if on_gpu else 0,
                max_restarts=0,  # a restarted process would have forgotten its state
                max_concurrency=max_concurrency,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._pools[seat.pool],
                    placement_group_bundle_index=self._bundle(seat),
                ),
            )
            .remote(),
        )
        return RayActor(seat, handle, self._store)


async def _meeting_place(ranks: Sequence[RayActor]) -> str:
    """Where rank 0 listens. Ranks of one machine meet on loopback: nobody outside needs to reach them."""
    nodes = await _first_cause([rank.call("node_address") for rank in ranks])
    host, port = await _free_address(ranks[0], None if len(set(nodes)) > 1 else LOOPBACK)
    return f"tcp://{host}:{port}"


async def _free_address(actor: RayActor, host: str | None) -> tuple[str, int]:
    """On the actor's machine, by its own address if no host is given."""
    host = host or cast(str, await actor.call("node_address"))
    return host, cast(int, await actor.call("free_port", host))


def nodes_of_ray() -> list[NodeCapacity]:
    """What the machines of the running Ray have in all."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        NodeCapacity(
            name="this machine" if len(alive) == 1 else node["NodeManagerHostname"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in alive
    ]


def _init_ray(config: ClusterConfig) -> None:
    """Quiet: processes write to Ray's log folder. Sockets stay behind the token that Ray makes by itself."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    if config.address is not None:
        _join_ray(config.address, config.packages)
        return
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=config.object_store_mb << 20,
    )


def _join_ray(address: str, packages: Sequence[str]) -> None:
    """Raises ValueError when nobody answers there."""
    folders = [_folder_of(package) for package in packages]
    try:
        ray.init(
            address=address,
            runtime_env={"py_modules": folders} if folders else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, AuthenticationError) as error:
        raise ValueError(
            f"cluster.address: no Ray at {address} lets us in ({error}); check that it runs, and if it asks for a "
            "token set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH; or set cluster.address=null to start one here"
        ) from error


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"cluster.packages: {package!r} can't be imported here; name importable packages")
    return str(Path(spec.origin).parent)


def _free_now() -> str:
    free = ray.available_resources()
    return f"{free.get('CPU', 0):g} cores, {free.get('GPU', 0):g} GPUs"


def _last_lines(process_id: int) -> list[str]:
    """The end of a worker's stderr; nothing for a process of another machine."""
    node = ray._private.worker.global_worker.node
    if node is None:
        return []
    for path in Path(node.get_logs_dir_path()).glob(f"worker-*-{process_id}.err"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip() and not line.startswith(":")][-LOG_LINES:]
    return []


async def _first_cause(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All answers in order, or the first failure; a death counts as first if it shows up right after."""
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
