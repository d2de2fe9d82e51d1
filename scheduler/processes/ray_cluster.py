"""Ray: pools as placement groups, roles as actors in them. Only this file, ray_actor.py and ray_start.py call Ray."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from grmpipe.models.types import Engine
from grmpipe.scheduler.placement import ClusterConfig, Placement, Seat, bundles_by_node, check_capacity
from grmpipe.scheduler.processes.actors import LOOPBACK, ActorRanks, EngineFactory, MemberFactory
from grmpipe.scheduler.processes.call_limits import CallLimits
from grmpipe.scheduler.processes.call_order import OrderedHost
from grmpipe.scheduler.processes.engine_host import EngineHost
from grmpipe.scheduler.processes.ray_actor import BucketStore, MemberHost, RayActor, define_actor, first_cause
from grmpipe.scheduler.processes.ray_start import (
    count_threads,
    free_now,
    init_ray,
    nodes_of_ray,
    own_signals,
    select_env_vars,
    without_allocator,
)
from grmpipe.scheduler.processes.remote_engine import RemoteEngine
from grmpipe.scheduler.processes.start_turns import StartTurns

log = logging.getLogger(__name__)
ROOM_EVERY_S = 5.0
RELEASE_S = 5.0  # for a joined Ray to release pools; one whose head is gone blocks for a minute
LEAST_SHARE = 1e-4  # Ray counts shares in these
NOT_BY_RAY = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
MAX_CALLS = 1000  # in a process at once: a control call must find its way past `collect`, and wait for an earlier one


class RayRanks:
    """The members of one class, one process each."""

    def __init__(self, actors: Sequence[RayActor]) -> None:
        self._actors = actors  # by rank; the cluster replaces members that it makes again

    @property
    def size(self) -> int:
        return len(self._actors)

    async def call(self, rank: int, method: str, *args: object) -> object:
        return await self._actors[rank].call("ask", method, *args)

    async def call_all(self, method: str, *args: object) -> list[object]:
        return await self.call_each(method, [args] * self.size)

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        assert len(args_by_rank) == self.size, f"{len(args_by_rank)} arguments for {self.size} ranks"
        return await first_cause(
            [actor.call("ask", method, *args) for actor, args in zip(self._actors, args_by_rank, strict=True)]
        )

    async def close(self) -> None:
        for actor in self._actors:
            actor.kill()


class RayCluster:
    """A cluster with the pools of a placement reserved. Ends only a Ray that it started itself."""

    _owner: ClassVar[int | None] = None  # the thread of the cluster that started Ray

    def __init__(
        self, config: ClusterConfig, placement: Placement, owns_ray: bool, variables: Mapping[str, str] | None = None
    ) -> None:
        """variables: of all processes on GPUs, unless they are set here."""
        self._config = config
        self._variables = dict(variables or {})
        self._nodes: dict[str, Mapping[int, str]] = {}  # pool -> the node of each of its bundles; Ray is slow to answer
        self._placement = placement
        self._turns = StartTurns(placement)
        self._owns_ray = owns_ray
        self._pools: dict[str, PlacementGroup] = {}
        self._reserved: dict[str, list[int]] = {}  # pool -> number of each bundle in its placement group
        self._members: dict[str, list[RayActor]] = {}
        self._member_factories: dict[str, MemberFactory] = {}
        self._engines: dict[str, RayActor] = {}
        self._factories: dict[str, EngineFactory] = {}
        self._num_restarts = 0
        self._roles_here: dict[str, bool] = {}  # role -> whether all its processes are on the driver's machine
        self._store = BucketStore()

    @classmethod
    async def start(
        cls,
        config: ClusterConfig,
        placement: Placement,
        wait_s: float = 0.0,
        variables: Mapping[str, str] | None = None,
    ) -> RayCluster:
        """Start or join Ray and reserve the pools. Raises ValueError, before anything is reserved, if the machines
        don't have them within `wait_s`.
        """
        owns_ray = not ray.is_initialized()
        if cls._owner not in (None, threading.get_ident()):
            raise ValueError(
                "cluster.kind: another run in this process has a Ray, which ends with it; start this run when that one "
                "has ended, or in a process of its own"
            )
        if owns_ray:
            # Not in another thread, though it blocks for seconds: Ray's servers die with the thread that started them.
            cls._owner = threading.get_ident()
            try:
                init_ray(config)
            except BaseException:
                cls._owner = None
                raise
        cluster = cls(config, placement, owns_ray, variables)
        try:
            await _until_room(placement, wait_s)
            cluster._ask_for_pools()  # not in the thread, which goes on when this is cancelled
            # Ray may still count a machine that was lost: its pools wait, for another one too.
            await asyncio.to_thread(cluster._until_reserved, max(wait_s, config.start_timeout_s))
        except BaseException:
            await cluster.shutdown()
            raise
        return cluster

    async def start_members(self, role: str, make_member: MemberFactory, *, meet: bool = True) -> ActorRanks:
        seats = self._placement.seats[role]
        async with self._turns.one_at_a_time(seats):
            actors = [self._create(seat, MemberHost) for seat in seats]
            self._members[role] = actors
            self._member_factories[role] = make_member
            await self._until_up(actors)
            init_method = await _meeting_place(actors) if meet and len(actors) > 1 else None
            await first_cause(
                [actor.call("make", make_member, rank, len(actors), init_method) for rank, actor in enumerate(actors)]
            )
            for seat, actor in zip(seats, actors, strict=True):
                await self._open_rpc(seat, actor)
        return RayRanks(actors)

    async def restart_member(self, role: str, rank: int) -> None:
        members = self._members[role]  # its ranks' own list, which they call
        seat = self._placement.seats[role][rank]
        async with self._turns.one_at_a_time([seat]):
            members[rank].kill()
            self._num_restarts += 1
            self._nodes.clear()  # Ray moves bundles from a machine that was lost
            actor = members[rank] = self._create(seat, MemberHost)
            await self._until_up([actor])
            await actor.call("make", self._member_factories[role], rank, len(members), None)
            await self._open_rpc(seat, actor)

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        self._factories[role] = make_engine
        seats = self._placement.seats[role]
        async with self._turns.one_at_a_time(seats):
            engines = await first_cause([self._start_engine(seat) for seat in seats])
        return {seat.name: engine for seat, engine in zip(seats, engines, strict=True)}

    async def restart_engine(self, role: str, name: str) -> Engine:
        (seat,) = (seat for seat in self._placement.seats[role] if seat.name == name)
        async with self._turns.one_at_a_time([seat]):
            self._engines[name].kill()
            self._num_restarts += 1
            self._nodes.clear()  # Ray moves bundles from a machine that was lost
            return await self._start_engine(seat)

    @property
    def starting(self) -> Sequence[Seat]:
        return self._turns.starting

    def machines(self, role: str) -> frozenset[str]:
        return frozenset(self._node_of(seat) for seat in self._placement.seats[role])

    def process_ids(self, role: str) -> list[int]:
        seats = [seat.name for seat in self._placement.seats.get(role, ())]
        actors = [*self._members.get(role, []), *(self._engines[name] for name in seats if name in self._engines)]
        if actors and role not in self._roles_here:  # asking Ray at every step would be slow
            self._roles_here[role] = self.machines(role) == {ray.get_runtime_context().get_node_id()}
        return [actor.process_id for actor in actors if self._roles_here[role]]

    async def free_address(self, role: str) -> tuple[str, int]:
        everywhere = {machine for other in self._placement.seats for machine in self.machines(other)}
        return await _free_address(self._members[role][0], LOOPBACK if len(everywhere) == 1 else None)

    async def strangers_to(self, folder: Path) -> list[str]:
        if not self._config.is_joined:  # only this machine
            return []
        token = folder / f".shared-{uuid.uuid4().hex}"
        token.touch()
        try:
            names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
            nodes = sorted({node for role in self._placement.seats for node in self.machines(role)})
            ask = ray.remote(num_cpus=0, max_retries=0)(_answer_of_folder)
            there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
            answers = await asyncio.gather(
                *(ask.options(scheduling_strategy=place).remote(str(token)) for place in there)
            )
            return [f"on {names[node]} {answer}" for node, answer in zip(nodes, answers, strict=True) if answer]
        finally:
            token.unlink(missing_ok=True)

    async def shutdown(self) -> None:
        actors = [*self._engines.values(), *(actor for members in self._members.values() for actor in members)]
        await asyncio.gather(*(actor.close() for actor in actors))
        if not (self._owns_ray and not self._config.is_joined):  # else all of it ends
            with suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await asyncio.to_thread(self._release_pools)
        if self._owns_ray:
            with own_signals():
                ray.shutdown()
            RayCluster._owner = None

    def _release_pools(self) -> None:
        for pool in self._pools.values():
            remove_placement_group(pool)

    def _ask_for_pools(self) -> None:
        for name, pool in self._placement.pools.items():
            bundles = [{pool.resource.upper(): float(len(slots))} for slots in self._placement.bundles(name)]
            self._pools[name] = placement_group(bundles, strategy=pool.strategy)

    def _until_reserved(self, limit_s: float) -> None:
        """Wait for the pools. Raises ValueError if one doesn't become free in time."""
        for name, group in self._pools.items():
            if not group.wait(limit_s):
                raise ValueError(
                    f"placement.pools.{name}: its {self._placement.pools[name].slots} "
                    f"{self._placement.pools[name].resource} slots did not become free within "
                    f"{limit_s:.0f} s (free now: {free_now()}); another job uses the rest: "
                    f"wait for it, or set placement.pools.{name}.slots lower"
                )
            nodes = placement_group_table(group)["bundles_to_node_id"]
            sizes = [len(slots) for slots in self._placement.bundles(name)]
            self._reserved[name] = bundles_by_node(sizes, [nodes[bundle] for bundle in range(len(sizes))])

    async def _start_engine(self, seat: Seat) -> Engine:
        devices = await self._find_devices(seat) if seat.is_spread else ()
        actor = self._engines[seat.name] = self._create(seat, EngineHost, devices)
        await self._until_up([actor])
        started = cast(str, await actor.call("start", self._factories[seat.role], seat.rank))
        if started:
            log.info("%s: %s", seat.name, started)
        await self._open_rpc(seat, actor)
        return RemoteEngine(actor, started)

    async def _open_rpc(self, seat: Seat, actor: RayActor) -> None:
        await actor.open_rpc(same_machine=self._node_of(seat) == ray.get_runtime_context().get_node_id())

    async def _until_up(self, actors: Sequence[RayActor]) -> None:
        await first_cause([actor.wait_until_up(self._config.start_timeout_s) for actor in actors])

    def _node_of(self, seat: Seat) -> str:
        if seat.pool not in self._nodes:
            self._nodes[seat.pool] = placement_group_table(self._pools[seat.pool])["bundles_to_node_id"]
        return self._nodes[seat.pool][self._bundle(seat)]

    def _bundle(self, seat: Seat) -> int:
        """The reserved bundle of a seat; of one that is spread, that of its first slot."""
        return self._bundles(seat)[0]

    def _bundles(self, seat: Seat) -> list[int]:
        pieces = self._placement.bundles(seat.pool)
        own = seat.each_slot if seat.is_spread else [seat.slots]
        return [self._reserved[seat.pool][pieces.index(piece)] for piece in own]

    async def _find_devices(self, seat: Seat) -> tuple[str, ...]:
        """The GPUs of an engine that shares several: those that Ray gives to whoever asks for a little of each bundle.
        Raises ValueError if they are on several nodes.
        """
        group, bundles = self._pools[seat.pool], self._bundles(seat)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        if len({nodes[bundle] for bundle in bundles}) > 1:
            raise ValueError(
                f"placement.pools.{seat.pool}.slots: the GPUs of {seat.name} are on several nodes; type a multiple of "
                f"a node's GPUs, or placement.pools.{seat.pool}.strategy=STRICT_PACK for a pool on one node"
            )
        ask = ray.remote(num_cpus=0, num_gpus=LEAST_SHARE, max_retries=0)(_list_own_gpus)
        places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) for bundle in bundles]
        found = await asyncio.gather(*(ask.options(scheduling_strategy=place).remote() for place in places))
        return tuple(itertools.chain.from_iterable(found))

    def _environment(self, role: str, gpus: float, devices: Sequence[str] = ()) -> dict[str, dict[str, str]]:
        """Variables of a process on a GPU: its threads; for an engine no settings of torch's allocator, which are the
        learner's. An engine that sleeps has an allocator of its own, and refuses expandable segments.

        devices: GPUs that Ray doesn't give it; none: it gives it all of them.
        """
        name, given = "OMP_NUM_THREADS", select_env_vars(self._config.env_vars, os.environ)
        return {
            "env_vars": {
                **{variable: os.environ.get(variable, value) for variable, value in self._variables.items()},
                name: given.get(name) or str(count_threads(nodes_of_ray(), gpus)),
                **(without_allocator(given, os.environ) if role in self._placement.served else {}),
                **({NOT_BY_RAY: "1", "CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
            }
        }

    def _create(self, seat: Seat, host: type[OrderedHost], devices: Sequence[str] = ()) -> RayActor:
        """Start a process on its seat. Ray limits the threads of a process with at most one core; a process on a GPU
        gets its share of the cores. devices: of a seat that is spread.
        """
        amount = len(seat.slots) if seat.share == 1 else math.floor(seat.share / LEAST_SHARE) * LEAST_SHARE
        on_gpu = self._placement.pools[seat.pool].resource == "gpu"
        # The name of a process killed just now may still be taken.
        name = f"{seat.name} ({self._num_restarts})" if self._num_restarts else seat.name
        handle = cast(
            ActorHandle[Any],
            ray.remote(define_actor(host))
            .options(
                name=name,
                num_cpus=0 if on_gpu else amount,
                num_gpus=amount if on_gpu and not devices else 0,
                runtime_env=self._environment(seat.role, amount, devices) if on_gpu else None,
                max_restarts=0,  # a restarted process would have forgotten its state
                max_concurrency=MAX_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._pools[seat.pool],
                    placement_group_bundle_index=self._bundle(seat),
                ),
            )
            .remote(),
        )
        return RayActor(seat, handle, self._store, CallLimits(call_timeout_s=self._config.call_timeout_s))


def _list_own_gpus() -> list[str]:
    """Runs in a bundle: the GPUs that Ray gives to it, by their numbers or ids on its node."""
    return [str(gpu) for gpu in ray.get_gpu_ids()]


def _answer_of_folder(token: str) -> str:
    """Runs on a machine of the cluster: why it can't see the token's folder; empty if it can."""
    path = Path(token)
    if not path.is_file():
        return "it doesn't exist"
    try:
        answer = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
        answer.touch()
        answer.unlink()
    except OSError as error:
        return f"it isn't writable ({error.strerror})"
    return ""


async def _until_room(placement: Placement, wait_s: float) -> None:
    """Wait for machines that hold the placement. Raises ValueError."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return check_capacity(placement, nodes_of_ray())
        except ValueError as lacks:
            if time.monotonic() >= until_s:
                raise
            log.info("waiting for room: %s", lacks)
        await asyncio.sleep(ROOM_EVERY_S)


async def _meeting_place(ranks: Sequence[RayActor]) -> str:
    """The address on which rank 0 listens. Ranks of one machine meet on loopback: no other machine needs to reach
    them.
    """
    nodes = await first_cause([rank.call("node_address") for rank in ranks])
    host, port = await _free_address(ranks[0], None if len(set(nodes)) > 1 else LOOPBACK)
    return f"tcp://{host}:{port}"


async def _free_address(actor: RayActor, host: str | None) -> tuple[str, int]:
    """A free address on the actor's machine; by the machine's own address if no host is given."""
    host = host or cast(str, await actor.call("node_address"))
    return host, cast(int, await actor.call("free_port", host))
