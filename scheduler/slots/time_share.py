"""A time-shared pool of a learner and engines: which of them uses the memory now.

    the batch is full -> the engines take no new requests, theirs are suspended -> they sleep
    -> the learner loads its whole state, steps, keeps only its weights -> the engines that it pushes to wake, paused
    -> the push -> the learner offloads its weights -> the other engines wake -> requests continue

During the learner's phase its clocks stand still. On the event loop's clock.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from grmpipe.models.types import Engine, EngineDied, OnDevice, Sleeper
from grmpipe.scheduler.clock import Standstill
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.slots.engine_replacement import BringCurrent, need_no_weights
from grmpipe.scheduler.weights.weight_push import SyncReport

log = logging.getLogger(__name__)

LEARNER = "learner"


class Offloadable(Protocol):
    """A learner whose state can leave the device between two steps."""

    async def keep_on_device(self, on_device: OnDevice) -> int:
        """Keep this part of its state on the device, and the rest on the host. Returns the bytes freed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRole:
    """One role whose engines share their slots with the learner.

    bring_current: brings a new engine up to date before its first request.
    is_pushed_to: whether this learner pushes to them.
    sleeps: whether they can free their memory; other engines are only paused.
    lends: whether the learner relies on that memory.
    """

    router: Router
    bring_current: BringCurrent = need_no_weights
    sleeps: bool = True
    lends: bool = True
    is_pushed_to: bool = False


class LearnerState:
    """What a learner has on its device: everything in its phase, its weights while they are pushed, else nothing.

    in_phase: the learner has the device. is_counted: freed bytes belong to a phase that hasn't ended.
    """

    def __init__(self, learner: Offloadable) -> None:
        self.in_phase = self.is_counted = False
        self.num_borrowing = 0  # pushes in progress, which need its weights on the device
        self.freed_bytes: int | None = None  # in the last phase
        self._learner = learner
        self._on_device: OnDevice = "nothing"
        self._moving = asyncio.Lock()  # held while the state moves

    @asynccontextmanager
    async def weights_there(self) -> AsyncIterator[None]:
        """Context in which its weights are on the device, and outside of its phase nothing else of it."""
        self.num_borrowing += 1
        try:
            await self.settle()
            yield
        finally:
            self.num_borrowing -= 1
            await self.settle()

    async def settle(self) -> None:
        """Move the state as it is needed now."""
        async with self._moving:
            needed: OnDevice = "weights" if self.num_borrowing else "nothing"
            if self.in_phase:
                needed = "everything"
            if needed == self._on_device:
                return
            freed = await self._learner.keep_on_device(needed)
            log.info("the learner has %s on the device: %+.3g GB were freed", needed, freed / 1e9)
            if self._on_device == "everything":
                self.freed_bytes = freed
            elif needed == "nothing" and self.is_counted:  # the counterpart of the beginning of a phase
                self.freed_bytes = freed + (self.freed_bytes or 0)
            if needed == "nothing":  # maybe after the phase: an engine that came may have borrowed the weights
                self.is_counted = False
            self._on_device = needed


class TimeShare:
    """The phases of a time-shared pool. Begins with the engines': they serve, and the learner has nothing on the
    device.

    clocks: stand still during the learner's phase.
    """

    def __init__(
        self, name: str, roles: Mapping[str, SharedRole], learner: Offloadable, events: EventSink | None = None
    ) -> None:
        """roles: all their engines are in their routers, awake."""
        self.name = name
        self.clocks = Standstill()
        self._freed_bytes: dict[str, int] = {}  # role -> bytes that its engines freed the last time
        self._roles = roles
        self._learner = LearnerState(learner)
        self._events = events or NoEvents()
        self._names = {role: tuple(shared.router.members.alive) for role, shared in roles.items()}
        self._inactive: set[Engine] = set()
        self._arriving = asyncio.Lock()  # held while a new engine comes: no phase of the learner begins meanwhile
        self._engine_phase = asyncio.Event()
        self._engine_phase.set()
        self._began_s: float | None = None  # start of the learner's phase

    def serves(self, role: str) -> bool:
        """Whether the engines of this role are in the pool."""
        return role in self._roles

    @property
    def freed_bytes(self) -> dict[str, int]:
        """Role -> bytes that it freed the last time."""
        by_learner = self._learner.freed_bytes
        return self._freed_bytes if by_learner is None else {**self._freed_bytes, LEARNER: by_learner}

    async def to_learner(self) -> None:
        """Return once the learner has the device and its state is there. Requests in flight lose nothing."""
        if self._learner.in_phase:
            return
        self._began_s = asyncio.get_running_loop().time()
        async with self._arriving:
            self._learner.in_phase = self._learner.is_counted = True
            self._engine_phase.clear()
            self.clocks.set(True)
            for role, shared in self._roles.items():
                for name in self._names[role]:
                    shared.router.members.deactivate(name)
        freed = await asyncio.gather(*map(self._drain_role, self._roles))
        self._freed_bytes |= dict(zip(self._roles, freed, strict=True))
        await self._learner.settle()

    async def push(self, push: Callable[[], Awaitable[SyncReport]]) -> SyncReport:
        """Push weights. The learner's phase ends with it."""
        self._learner.in_phase = False
        self._engine_phase.set()  # the push may wait for a new engine
        async with self._learner.weights_there():
            await self._wake([role for role, shared in self._roles.items() if shared.is_pushed_to])
            report = await push()
        await self._end_learner_phase()
        return report

    @asynccontextmanager
    async def learner_phase(self) -> AsyncIterator[None]:
        """Context: a phase of the learner that changes no weights, to save its state or read it before a push."""
        await self.to_learner()
        try:
            yield
        finally:
            self._learner.in_phase = False
            await self._learner.settle()
            await self._end_learner_phase()

    async def bring_current(self, role: str, name: str, engine: Engine, admit: Callable[[], None]) -> None:
        """Bring a replacement of a dead engine up to date. In the learner's phase it sleeps until its end."""
        shared = self._roles[role]

        def admit_and_serve() -> None:
            admit()
            shared.router.members.activate(name, engine)

        if self._learner.in_phase:
            await self._put_to_sleep(shared, name, engine)
        while True:
            await self._engine_phase.wait()
            async with self._arriving:
                if self._learner.in_phase:
                    continue
                await self._wake_engine(shared, engine)
                await engine.resume()
                if not shared.is_pushed_to:
                    await shared.bring_current(name, engine, admit_and_serve)
                    return
                async with self._learner.weights_there():
                    await shared.bring_current(name, engine, admit_and_serve)
                return

    # -- the engines ---------------------------------------------------------------------------------------------------

    async def _drain_role(self, role: str) -> int:
        """Drain a role's engines and put them to sleep, if they can sleep. Returns the bytes freed."""
        shared = self._roles[role]
        return sum(await asyncio.gather(*(self._leave(shared, name) for name in self._names[role])))

    async def _leave(self, shared: SharedRole, name: str) -> int:
        await shared.router.preempt(name)
        await shared.router.until_idle(name)
        if (engine := shared.router.members.alive.get(name)) is None:
            return 0
        try:
            return await self._put_to_sleep(shared, name, engine)
        except EngineDied as death:
            shared.router.members.mark_dead(name, engine, death)
            return 0

    async def _put_to_sleep(self, shared: SharedRole, name: str, engine: Engine) -> int:
        self._inactive.add(engine)
        if shared.sleeps and isinstance(engine, SleepingEngine):
            return await sleep_engine(name, engine, lends=shared.lends)
        await engine.pause()
        return 0

    async def _wake_engine(self, shared: SharedRole, engine: Engine) -> None:
        """Wake an engine; it stays paused."""
        if engine in self._inactive:
            self._inactive.discard(engine)
            if shared.sleeps and isinstance(engine, SleepingEngine):
                await engine.wake()

    async def _wake(self, roles: Sequence[str]) -> None:
        """Let the engines of these roles serve. Those that a push will reach stay paused until then: older weights
        sample no token.
        """
        for shared in (self._roles[role] for role in roles):
            resting = {name: e for name, e in shared.router.members.alive.items() if e in self._inactive}
            await asyncio.gather(*(self._rise(shared, name, engine) for name, engine in resting.items()))

    async def _rise(self, shared: SharedRole, name: str, engine: Engine) -> None:
        try:
            await self._wake_engine(shared, engine)
            if not (shared.is_pushed_to and self._learner.num_borrowing):
                await engine.resume()
        except EngineDied as death:
            shared.router.members.mark_dead(name, engine, death)
        shared.router.members.activate(name, engine)

    async def _end_learner_phase(self) -> None:
        await self._wake(tuple(self._roles))
        self._engine_phase.set()
        self.clocks.set(False)
        if self._began_s is not None:
            now_s = asyncio.get_running_loop().time()
            freed = {f"freed_gb_{who}": round(num_bytes / 1e9, 3) for who, num_bytes in self.freed_bytes.items()}
            self._events.span(self.name, "the learner's phase", self._began_s, now_s, **freed)
            self._began_s = None


@runtime_checkable
class SleepingEngine(Engine, Sleeper, Protocol):
    """An engine that can free its device's memory."""


async def sleep_engine(name: str, engine: SleepingEngine, *, lends: bool = True) -> int:
    """Put an engine to sleep. Returns the bytes freed. `lends`: whether another process relies on them: if so, freeing
    none is a warning.
    """
    await engine.pause()
    if (num_bytes := await engine.sleep()) == 0 and lends:
        log.warning("%s sleeps but freed no memory: the other engine of the slot may lack it", name)
    else:
        log.info("%s sleeps: %.3g GB were freed", name, num_bytes / 1e9)
    return num_bytes


async def put_to_sleep(router: Router) -> None:
    """Put the engines of a role that doesn't serve yet to sleep; those of the next role start on the same devices."""
    for name, engine in router.members.alive.items():
        if isinstance(engine, SleepingEngine):
            await sleep_engine(name, engine)
