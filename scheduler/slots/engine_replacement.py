"""Replaces dead engines of a role, within the run.

    HEALTHY -> (it dies) -> DEAD -> STARTING -> STALE -> HEALTHY
                             ^          |         |
                             +----------+---------+  a try that failed; after the last one LOST

STALE: it has the weights of its files and doesn't serve, until it gets those of the others (policy) or needs none
(judge). The router sends its requests elsewhere meanwhile, or lets them wait.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass

from grmpipe.models.bounds import Bounded, above, at_least
from grmpipe.models.types import Engine, EngineDied
from grmpipe.scheduler.clock import Standstill
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.scheduler.routing.router import NO_REQUEST, Router
from grmpipe.scheduler.slots.replacement_tries import WINDOW_S, ReplacementTries
from grmpipe.scheduler.weights.weight_push import (
    LEARNER,
    EngineLost,
    SyncReport,
    WeightMismatch,
    WeightsNotFinite,
    WeightSyncTimeout,
)
from grmpipe.scheduler.weights.weight_sync import NoEngines, WeightSync

log = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 5.0  # a longer busy engine isn't dead; only many such checks show that it hangs
RETRY_AFTER_S = 2.0  # the memory of the last try may not be free yet


@dataclass(frozen=True)
class HealthConfig(Bounded):
    """How many dead engines are replaced, and how soon an idle engine's death is noticed."""

    # [replacements] Most tries to replace an engine within an hour, and most restarts of a run whose learner or critic
    # died; 0: a dead engine stays dead, a dead learner ends the run.
    max_replacements: int = at_least(0, 3)
    check_every_s: float = above(0, 5.0)  # Interval between checks of engines.
    # An engine that answers neither checks nor requests for this long counts as dead.
    hung_after_s: float = above(0, 120.0)
    # Limit for a replacement to start and load its model, and for room in the cluster when a run begins again.
    start_deadline_s: float = above(0, 600.0)


class EngineState(enum.Enum):
    """The state of an engine. Only HEALTHY ones serve."""

    HEALTHY = "healthy"
    DEAD = "dead"
    STARTING = "starting"
    STALE = "stale"
    LOST = "lost"


Restart = Callable[[str], Awaitable[Engine]]  # name -> a new engine on its seat, once the rest of the old one ended
# (name, engine, admit): give an engine the weights that the role serves, then call `admit`.
BringCurrent = Callable[[str, Engine, Callable[[], None]], Awaitable[object]]


class SharedRestart:
    """The restarts of engines that serve several roles: the first one to ask for a dead engine starts another, which
    the others get too. Each brings its own weights.
    """

    def __init__(self, restart: Restart, engines: Mapping[str, Engine]) -> None:
        self._restart, self._newest, self._first = restart, dict(engines), dict(engines)
        self._had: dict[tuple[str, str], Engine] = {}  # (role, name) -> the engine that the role got last
        self._turn = asyncio.Lock()

    async def replace_engine(self, role: str, name: str) -> Engine:
        """A newer engine than the one that the role had under this name."""
        async with self._turn:
            if self._had.get((role, name), self._first[name]) is self._newest[name]:
                self._newest[name] = await self._restart(name)
            self._had[role, name] = self._newest[name]
            return self._newest[name]


async def need_no_weights(name: str, engine: Engine, admit: Callable[[], None]) -> None:
    """Admit an engine at once, for roles that serve the weights of their files."""
    admit()


class RoleHealth:
    """Monitors the engines of one role, while `run` runs.

    clocks: stand still while the role has no engine.
    """

    def __init__(
        self,
        role: str,
        router: Router,
        restart: Restart,
        config: HealthConfig,
        bring_current: BringCurrent = need_no_weights,
        events: EventSink | None = None,
    ) -> None:
        self.role = role
        self.num_replaced = 0
        self.states = dict.fromkeys(router.members.alive, EngineState.HEALTHY)
        self._router = router
        self._restart = restart
        self._config = config
        self._bring_current = bring_current
        self._events = events or NoEvents()
        self._tries = ReplacementTries(config.max_replacements)
        self._since_s: dict[str, float] = {}
        self._silent: dict[str, tuple[Engine, float]] = {}  # engine -> since when it answers no check
        self._dead: asyncio.Queue[str] = asyncio.Queue()
        self.clocks = Standstill()
        router.members.on_death = self._take_death
        router.on_kills = self._forgive

    @property
    def is_out(self) -> bool:
        """Whether no engine is alive and one is starting."""
        states = self.states.values()
        return EngineState.HEALTHY not in states and any(state is not EngineState.LOST for state in states)

    async def run(self) -> None:
        """Replace dead engines and check the others; never returns. Raises errors that no replacement can solve."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look_around())
                while True:
                    tasks.create_task(self._replace(await self._dead.get()))
        except BaseExceptionGroup as crashes:
            raise crashes.exceptions[0] from None

    def _take_death(self, name: str, death: EngineDied) -> bool:
        """Called by the router at a death. Returns whether there will be a replacement."""
        log.warning("%s died: %s", name, death)
        self._enter(name, EngineState.DEAD)
        if not self._tries.may_try(name):
            self._lose(name)
            return False
        self._dead.put_nowait(name)
        return True

    def _forgive(self, name: str) -> None:
        """Forget the death of an engine that a request killed: it says nothing about the engine."""
        log.warning("a death of %s is attributed to a request and uses up no replacement", name)
        self._tries.give_back(name)

    async def _replace(self, name: str) -> None:
        """Bring an engine from DEAD to HEALTHY, or LOST. The first try is counted already."""
        while (failure := await self._try(name)) is not None:
            log.warning("%s could not be replaced (attempt %d of %d): %s", name, self._tries.num_made(name),
                        self._config.max_replacements, failure)  # fmt: skip
            self._enter(name, EngineState.DEAD)
            if not self._tries.may_try(name):
                self._lose(name)
                self._router.members.give_up(name)
                return
            await asyncio.sleep(RETRY_AFTER_S)

    async def _try(self, name: str) -> Exception | None:
        """One try to replace an engine. Returns its error, if any. Wrong weights are raised: another try wouldn't
        help.
        """
        try:
            self._enter(name, EngineState.STARTING)
            async with asyncio.timeout(self._config.start_deadline_s):
                engine = await self._restart(name)
            self._enter(name, EngineState.STALE)
            await self._bring_current(name, engine, lambda: self._admit(name, engine))
        except (WeightMismatch, WeightsNotFinite):
            raise
        except Exception as failure:
            return failure
        return None

    def _admit(self, name: str, engine: Engine) -> None:
        self._enter(name, EngineState.HEALTHY)
        self.num_replaced += 1
        self._router.members.admit(name, engine)

    def _lose(self, name: str) -> None:
        self._enter(name, EngineState.LOST)
        log.warning("%s is not replaced: its slots.health.max_replacements=%d attempts in %.0f s are used up", name,
                    self._config.max_replacements, WINDOW_S)  # fmt: skip

    def _enter(self, name: str, state: EngineState) -> None:
        """Enter a state. The state that ends becomes a span in the engine's lane, unless it was HEALTHY."""
        now_s = asyncio.get_running_loop().time()
        left = self.states[name]
        if left not in (EngineState.HEALTHY, state):
            self._events.span(name, left.value, self._since_s[name], now_s, next=state.value)
        log.info("%s: %s -> %s", name, left.value, state.value)
        self.states[name], self._since_s[name] = state, now_s
        self.clocks.set(self.is_out)

    async def _look_around(self) -> None:
        """Check engines without requests, which may be dead, and those with requests, which may hang."""
        clock = asyncio.get_running_loop().time
        while True:
            begun_s = clock()
            await asyncio.sleep(self._config.check_every_s)
            engines, looked_s = self._router.members.alive, clock()
            liveness = await check_liveness(engines)
            # While this event loop stood still, by a call that blocked it or for want of a core, it heard no answer.
            deaf_s = max(0.0, clock() - begun_s - self._config.check_every_s - LOOK_TIMEOUT_S)
            for name, death in (liveness.dead | self._hung(engines, liveness.silent, looked_s, deaf_s)).items():
                self._router.members.mark_dead(name, engines[name], death)

    def _hung(
        self, engines: Mapping[str, Engine], silent: Set[str], looked_s: float, deaf_s: float
    ) -> dict[str, EngineDied]:
        """Engines that have answered neither a check nor a request for too long. deaf_s: does not count as silence."""
        before, self._silent = self._silent, {}
        hung: dict[str, EngineDied] = {}
        for name in silent:
            engine, since_s = before.get(name, (engines[name], looked_s))
            # A busy engine may answer no check, but it answers requests.
            if engine is not engines[name] or self._router.members[name].heard_s > since_s:
                since_s = looked_s
            since_s += deaf_s
            self._silent[name] = engines[name], since_s
            silent_s = asyncio.get_running_loop().time() - since_s
            if silent_s >= self._config.hung_after_s:
                hung[name] = EngineDied(f"it hangs: it answered nothing for {silent_s:.0f} s")
        return hung


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessCheck:
    """The result of checking engines: dead ones, and those that didn't answer in time."""

    dead: dict[str, EngineDied]
    silent: Set[str]


async def check_liveness(engines: Mapping[str, Engine]) -> LivenessCheck:
    """Check engines by an abort of a request that doesn't exist."""
    probes = {name: asyncio.ensure_future(engine.abort(NO_REQUEST)) for name, engine in engines.items()}
    if not probes:
        return LivenessCheck(dead={}, silent=frozenset())
    try:
        done, _ = await asyncio.wait(probes.values(), timeout=LOOK_TIMEOUT_S)
    finally:
        for probe in probes.values():
            probe.cancel()
    found = {name: probe.exception() for name, probe in probes.items() if probe in done}
    return LivenessCheck(
        dead={name: death for name, death in found.items() if isinstance(death, EngineDied)},
        silent=probes.keys() - found.keys(),
    )


async def push_to_living(sync: WeightSync, router: Router, version: int) -> SyncReport:
    """Bring all engines in use to `version`. Those that die meanwhile are marked dead, and the push is repeated for the
    rest.

    Engines that hang are marked dead as well: those that answer no check, or not the push that all others took in time.
    If none is left, or all are inactive, it waits for one, which gets this version. Raises like `WeightSync.push`, but
    EngineDied only if no engine is left and none will come.
    """
    while True:
        await _until_any_engine(sync, router)
        try:
            return await sync.push(lambda: router.in_use, version)
        except NoEngines:
            continue
        except EngineLost as lost:
            log.warning("the push of version %d starts over: %s", version, lost)
            router.members.mark_dead(lost.name, lost.engine, lost)
            sync.dismiss(lost.name, lost.engine, lost)
        except (WeightMismatch, WeightsNotFinite):  # no death explains these: they end the run
            raise
        except Exception as failure:  # a death often appears first as its peers' broken connections, or as silence
            suspects = {**router.members.alive, **sync.arrivals}
            if not (gone := await _gone_among(suspects, failure)):
                raise
            log.warning("the push of version %d starts over: %s", version, failure)
            for name, death in gone.items():
                router.members.mark_dead(name, suspects[name], death)
                sync.dismiss(name, suspects[name], death)


async def _gone_among(engines: Mapping[str, Engine], failure: Exception) -> Mapping[str, EngineDied]:
    """The engines that made a push fail: dead ones; after a timeout, those that hang."""
    liveness = await check_liveness(engines)
    if liveness.dead or not isinstance(failure, WeightSyncTimeout):
        return liveness.dead
    late = failure.waiting_for & engines.keys()
    hung = late & liveness.silent
    if not hung and late < engines.keys() and LEARNER not in failure.waiting_for:
        hung = late  # all others are done
    return {name: EngineDied(f"it hangs: {failure}") for name in hung}


async def _until_any_engine(sync: WeightSync, router: Router) -> None:
    """Return once an engine serves or waits for the push. Raises EngineDied if none will come."""
    waits = [asyncio.ensure_future(wait) for wait in (router.until_served(), sync.until_arrival())]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    for wait in done:
        wait.result()
