"""The pushes of a learner to its engines, one at a time: which engine needs what, and new engines.

A push holds the learner's weights and brings them to every engine (see weight_push.py). A new engine catches up with
the last push or, if the learner has stepped since, waits for the next.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from grmpipe.models.types import Engine, EngineDied, GroupBackend, GroupLink
from grmpipe.scheduler.weights.weight_push import JOIN_S, LEARNER, Push, SyncConfig, SyncReport, WeightSource

# Share of the deadline: a broadcast whose peer is gone must end before the next push, which queues behind it.
GROUP_TIMEOUT_SHARE = 1 / 3


class NoEngines(Exception):
    """There was no engine to push to, and none waiting."""


Engines = Callable[[], Mapping[str, Engine]]
NewAddress = Callable[[], Awaitable[tuple[str, int]]]  # an address of the sender's machine with a free port


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A new engine that waits for the next push."""

    engine: Engine
    admit: Callable[[], None]
    current: asyncio.Future[SyncReport]


class WeightSync:
    """The pushes of one learner to its engines, one at a time. It remembers the last push, the group of broadcasts, and
    the version of each engine.
    """

    def __init__(
        self,
        source: WeightSource,
        probe_ids: Sequence[int],
        config: SyncConfig,
        *,
        transport: str = "object_store",
        group: GroupBackend | None = None,
        ranks_per_engine: int = 1,
        new_address: NewAddress | None = None,
    ) -> None:
        """transport: name of the transport, for the report. group: backend of its broadcasts, if it has any; needs
        `new_address`.
        """
        assert group is None or new_address is not None, f"{transport}: no rendezvous address"
        self._source = source
        self._probe_ids = tuple(probe_ids)
        self._config = config
        self._transport = transport
        self._backend = group
        self._ranks_per_engine = ranks_per_engine
        self._new_address = new_address
        self._turn = asyncio.Lock()
        self._last: tuple[int, int] | None = None  # version and optimizer steps of the last push
        self._arrivals: dict[str, _Arrival] = {}
        self._arrived = asyncio.Event()
        self._versions: dict[str, tuple[Engine, int]] = {}  # name -> (engine, its version)
        self._members: list[Engine] = []  # the group's
        self._link: GroupLink | None = None
        self._probe_error: float | None = None  # the last push's
        self._sent: int | None = None  # the version that the source sent last, to any engine; None: not to the end

    async def push(self, engines: Engines, version: int) -> SyncReport:
        """Bring all engines, and those that wait to catch up, to `version`. `engines` is read after earlier pushes have
        ended.

        Raises WeightMismatch, WeightsNotFinite, WeightSyncTimeout, or EngineLost, which names the engine.
        """
        async with self._turn:
            arrivals = dict(self._arrivals)
            everyone = {**engines(), **self.arrivals}
            if not everyone:
                raise NoEngines(f"version {version} has no engine to be sent to")
            push = self._begin(everyone, version)
            async with push.deadline(), AsyncExitStack() as hold:
                steps = await push.step(LEARNER, "to pause", hold.enter_async_context(self._source.held()))
                report = await self._run(push)
            self._last = (version, steps)
            for name, arrival in arrivals.items():
                # It may be gone: it died during the push, or nobody waits for it any more.
                if self._arrivals.pop(name, None) is not None and not arrival.current.done():
                    arrival.admit()
                    arrival.current.set_result(report)
            return report

    async def catch_up(self, name: str, engine: Engine, admit: Callable[[], None]) -> SyncReport:
        """Bring a new or reactivated engine to the version of the last push; if the learner has stepped since, the next
        push does so.

        `admit` is called at the moment when the engine is up to date, so that no later push misses it. Raises
        like `push`; the other engines aren't affected.
        """
        async with self._turn:
            # Without a deadline: the hold waits for an optimizer step of any duration.
            async with self._source.held() as steps:
                # Otherwise nothing was pushed, or the learner has stepped since: no other engine serves its weights.
                if self._last is not None and self._last[1] == steps:
                    if self._versions.get(name) == (engine, self._last[0]):
                        admit()
                        return make_empty_report(self._last[0], self._transport)
                    push = self._begin({name: engine}, self._last[0])
                    async with push.deadline():
                        report = await self._run(push)
                    admit()
                    return report
            arrival = _Arrival(engine=engine, admit=admit, current=asyncio.get_running_loop().create_future())
            self._arrivals[name] = arrival
            self._arrived.set()
        try:
            return await arrival.current
        finally:
            if self._arrivals.get(name) is arrival:
                del self._arrivals[name]

    def send_from(self, source: WeightSource, probe_ids: Sequence[int]) -> None:
        """Send another source's weights from the next push on. probe_ids: tokens that it can score."""
        self._source, self._probe_ids = source, tuple(probe_ids)

    @asynccontextmanager
    async def block_pushes(self) -> AsyncIterator[None]:
        """Context in which no push runs. Before it, remove an engine that leaves from `engines`."""
        async with self._turn:
            yield

    @property
    def arrivals(self) -> Mapping[str, Engine]:
        """The engines that wait for the next push."""
        return {name: arrival.engine for name, arrival in self._arrivals.items()}

    def dismiss(self, name: str, engine: Engine, death: EngineDied) -> None:
        """An engine died; if it was waiting for a push, its wait raises the death."""
        arrival = self._arrivals.get(name)
        if arrival is not None and arrival.engine is engine:
            del self._arrivals[name]
            if not arrival.current.done():
                arrival.current.set_exception(death)

    async def until_arrival(self) -> None:
        """Return once an engine waits for the next push."""
        while not self._arrivals:
            self._arrived.clear()
            await self._arrived.wait()

    def _begin(self, engines: Mapping[str, Engine], version: int) -> Push:
        """What engines have is forgotten until the push succeeds."""
        had = {name: self._versions.pop(name, (None, 0)) for name in engines}
        # The same engine, not only its name: a replacement has no bucket at all.
        have_fixed = frozenset(name for name, engine in engines.items() if had[name][0] is engine)
        all_have_last = all(had[name] == (engine, self._sent) for name, engine in engines.items())
        self._sent = None
        return Push(
            self._source, engines, version, self._probe_ids, self._config, have_fixed, all_have_last, self._probe_error
        )

    async def _run(self, push: Push) -> SyncReport:
        """A push within a hold."""
        link = await self._group(push)
        self._link = None  # a group in which a push failed is never used again
        report = await push.run(link, self._ranks_per_engine, self._transport)
        self._link, self._members = link, list(push.engines.values())
        self._probe_error, self._sent = report.probe_error, push.version
        for name, engine in push.engines.items():
            self._versions[name] = (engine, push.version)
        return report

    async def _group(self, push: Push) -> GroupLink | None:
        """The sender's link to the group. A new group whenever an engine came, left or failed: groups are never
        repaired.
        """
        if self._backend is None:
            return None
        members = list(push.engines.values())
        if self._link is not None and members == self._members:
            return self._link
        assert self._new_address is not None
        push.allow(JOIN_S)
        address, port = await push.step(LEARNER, "to find a free port", self._new_address())
        return GroupLink(
            name=f"weights-{secrets.token_hex(4)}",
            backend=self._backend,
            address=address,
            port=port,
            rank=0,
            world_size=1 + len(members) * self._ranks_per_engine,
            timeout_s=self._config.deadline_s * GROUP_TIMEOUT_SHARE,
            join_timeout_s=JOIN_S,
        )


def make_empty_report(version: int, transport: str) -> SyncReport:
    """The report for an engine that was inactive since the last push and missed none."""
    return SyncReport(
        version=version, seconds=0.0, pause_seconds=0.0, num_bytes=0, probe_error=0.0, transport=transport
    )
