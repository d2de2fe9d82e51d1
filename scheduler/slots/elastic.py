"""Elastic pools: slots that change between roles. Carries out what balance.py decides.

A slot holds an engine for each role of its pool and serves one of them. A move from A to B:

    A takes no new requests on it -> its requests migrate to A's other engines, or end here -> A sleeps, if it can
    -> B wakes -> B is brought to the weights that its role serves -> B takes requests, and its share of those in flight

All on the event loop's clock. Routers send the requests; this module only says which engines serve.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass

from grmpipe.models.types import Engine, EngineDied
from grmpipe.scheduler.clock import Standstill
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.scheduler.routing.load import NEVER_S
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.slots.balance import Move, Pool, Slot, decide
from grmpipe.scheduler.slots.engine_replacement import BringCurrent, need_no_weights
from grmpipe.scheduler.slots.time_share import SleepingEngine, sleep_engine
from grmpipe.scheduler.weights.weight_push import SyncReport

log = logging.getLogger(__name__)

LEAVE_DEADLINE_S = 60.0  # for an engine to let its requests go, to fall asleep, to wake
CHECK_EVERY_S = 0.2  # the longest wait between two decisions: news interrupts it, so it bounds only what brings none
ASSUMED_SWITCH_S = 0.5  # for a move, until some were measured
LEAST_COST_S = 0.05  # migrated requests are prefilled again, which isn't measured
COST_MEMORY = 0.7  # weight of earlier switches in the estimate of the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRole:
    """One role of an elastic pool.

    router:         sends its requests; begins with the engines of all slots, all serving.
    bring_current:  brings a new engine up to date before its first request.
    max_rows:       most that one engine runs at once.
    sleeps:         its engines share a device's memory: an inactive engine frees it.
    block_pushes: context in which no engine of the role is pushed to.
    memory_still:   context in which no learner on these devices takes memory: vLLM's sleep fails if less is free after
                    it.
    """

    router: Router
    bring_current: BringCurrent = need_no_weights
    max_rows: int = 1 << 30
    sleeps: bool = False
    block_pushes: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    memory_still: Callable[[], AbstractAsyncContextManager[object]] = nullcontext

    def activate(self, name: str, engine: Engine) -> None:
        """Let an engine serve. Its idle time begins at 0."""
        self.router.members.activate(name, engine)
        self.router.load.woke(name)


class ElasticPool:
    """The slots of a pool. `run` never returns; before it runs, slots keep their roles.

    clocks: role -> clocks that stand still while no slot serves it.
    """

    def __init__(
        self,
        name: str,
        slots: Mapping[str, Mapping[str, str]],
        roles: Mapping[str, ElasticRole],
        events: EventSink | None = None,
    ) -> None:
        """slots: slot -> role -> the name of its engine. roles: in the order of the flow; all slots begin with the
        first one.
        """
        self.name = name
        self.moves: Counter[str] = Counter()  # "policy->grm" -> number
        self._engines = slots
        self._roles = roles
        self._events = events or NoEvents()
        first = next(iter(roles))
        self._serves = dict.fromkeys(slots, first)  # what each slot serves, or will serve once its move is done
        self._moving: set[str] = set()
        self._levelling: set[str] = set()  # roles whose requests are being spread evenly
        self._settled = asyncio.Event()  # set when a move ended
        self._news = asyncio.Event()
        self._switch_s: dict[tuple[str, str], float] = {}
        self.clocks = {role: Standstill() for role in roles}
        for role, elastic in roles.items():
            elastic.router.members.on_change = self._news.set
            for slot in slots if role != first else ():
                elastic.router.members.deactivate(slots[slot][role])
        self._update_clocks()

    @property
    def slots_by_role(self) -> dict[str, int]:
        """Role -> number of slots that serve it, or are moving to it."""
        counts = Counter(self._serves.values())
        return {role: counts[role] for role in self._roles}

    async def run(self) -> None:
        """Check, move, wait for news. Raises the error of a failed move, except for deaths."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    while (move := decide(view := self.view())) is not None:
                        self._begin(move)
                        tasks.create_task(self._carry_out(move))
                    for role in self._uneven(view):
                        tasks.create_task(self._rebalance(role))
                    await self._until_news()
        except BaseExceptionGroup as crashes:
            raise crashes.exceptions[0] from None

    async def bring_current(self, role: str, name: str, engine: Engine, admit: Callable[[], None]) -> None:
        """Bring a replacement of a dead engine up to date. If its slot serves another role, it stays inactive."""
        slot = next(slot for slot, engines in self._engines.items() if engines[role] == name)
        elastic = self._roles[role]

        def admit_and_serve() -> None:
            admit()
            if self._serves[slot] == role and slot not in self._moving:  # it may have moved meanwhile
                elastic.activate(name, engine)
                self._update_clocks()

        await self._until_settled(slot)
        if self._serves[slot] != role:
            admit()
        else:
            await elastic.bring_current(name, engine, admit_and_serve)
        await self._until_settled(slot)
        if self._serves[slot] != role:
            async with self._held(slot):
                await self._let_go(elastic, name, engine)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def view(self) -> Pool:
        """The pool as the rules see it at this moment."""
        backlogs = {role: elastic.router.load.backlog(elastic.max_rows) for role, elastic in self._roles.items()}
        slots = [self._slot(slot) for slot in self._engines]
        return Pool(roles=backlogs, slots=slots, cost_s=self._cost_s)

    def _slot(self, slot: str) -> Slot:
        role, engines = self._serves[slot], self._engines[slot]
        router = self._roles[role].router
        if slot in self._moving:
            return Slot(name=slot, role=role, able=frozenset({role}))
        able = frozenset(
            other for other, elastic in self._roles.items() if engines[other] in elastic.router.members.alive
        )
        return Slot(
            name=slot,
            role=role,
            able=able,
            idle_s=router.load.idle_s(engines[role]),
        )

    def _cost_s(self, source: str, target: str) -> float:
        cost_s = max(self._switch_s.get((source, target), ASSUMED_SWITCH_S), LEAST_COST_S)
        if self._roles[target].bring_current is need_no_weights:
            return cost_s
        # New engines catch up one after another, and the learner's push waits for them.
        return cost_s * (1 + sum(self._serves[slot] == target for slot in self._moving))

    def _uneven(self, view: Pool) -> set[str]:
        """Roles with one slot that has idled for as long as a move costs, and another with requests to spare: the rules
        assume evenly spread work.
        """
        idle = {slot.role for slot in view.slots if slot.idle_s >= self._patience_s(slot)}
        return {role for role in idle - self._levelling if spare(self._roles[role].router)}

    def _patience_s(self, slot: Slot) -> float:
        return min((self._cost_s(slot.role, other) for other in slot.able - {slot.role}), default=LEAST_COST_S)

    async def _rebalance(self, role: str) -> None:
        """Spread a role's requests; the remainder goes to idle slots one by one."""
        router = self._roles[role].router
        self._levelling.add(role)
        try:
            await router.rebalance()
            for _ in range(sum(not router.load[name] for name in router.members.serving)):
                if (crowded := spare(router)) is not None:
                    await router.migrate(crowded, 1)
        finally:
            self._levelling.discard(role)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _begin(self, move: Move) -> None:
        gain = f"gain {move.gain_s:.3g} s" if move.gain_s < NEVER_S / 2 else "the only way"
        log.info("%s %s: %s -> %s (%s, cost %.3g s): %s", self.name, move.slot, move.source, move.target,
                 gain, move.cost_s, move.reason)  # fmt: skip
        self._moving.add(move.slot)
        self._serves[move.slot] = move.target
        self._roles[move.source].router.members.deactivate(self._engines[move.slot][move.source])
        self._update_clocks()

    async def _carry_out(self, move: Move) -> None:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        try:
            cost_s = await self._leave(move) + await self._enter(move)
        except EngineDied as death:
            # The slot belongs to the target anyway: its replacement will serve there.
            log.warning("%s %s: %s", self.name, move.slot, death)
            return
        finally:
            self._settle(move.slot)
            self._update_clocks()
        self._learn_cost(move, cost_s)
        self.moves[f"{move.source}->{move.target}"] += 1
        self._events.span(f"{self.name} {move.slot}", f"switch {move.source}->{move.target}", started_s, clock(),
                          cost_s=round(cost_s, 4), gain_s=round(move.gain_s, 4), reason=move.reason)  # fmt: skip
        await self._rebalance(move.target)

    async def _leave(self, move: Move) -> float:
        """Drain the slot's engine of the old role and release it. Returns the seconds of the release."""
        elastic, name = self._roles[move.source], self._engines[move.slot][move.source]
        with suppress(EngineDied):  # a dead engine has no requests
            async with _in_time(elastic.router, name, "release its requests"):
                await elastic.router.migrate(name)
        await elastic.router.until_idle(name)
        engine, clock = elastic.router.members.alive.get(name), asyncio.get_running_loop().time
        left_s = clock()
        if engine is not None:
            await self._let_go(elastic, name, engine)
        return clock() - left_s

    async def _let_go(self, elastic: ElasticRole, name: str, engine: Engine) -> None:
        """Put an inactive engine to sleep, if it can sleep; if it dies of that, its memory is free as well. A running
        push, which may include it, ends first.
        """
        if not (elastic.sleeps and isinstance(engine, SleepingEngine)):
            return
        try:
            async with elastic.block_pushes(), elastic.memory_still(), _in_time(elastic.router, name, "fall asleep"):
                await sleep_engine(name, engine)
        except EngineDied as death:
            elastic.router.members.mark_dead(name, engine, death)

    async def _enter(self, move: Move) -> float:
        """Wake the slot's engine of the new role, bring it up to date and let it serve. Returns the seconds this took,
        without waiting for a learner between a step and its push.
        """
        elastic, name = self._roles[move.target], self._engines[move.slot][move.target]
        if (engine := elastic.router.members.alive.get(name)) is None:
            raise EngineDied(f"{name} died before it was activated")
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            if elastic.sleeps and isinstance(engine, SleepingEngine):
                async with _in_time(elastic.router, name, "wake up"):
                    await engine.wake()
                    await engine.resume()
            awake_s = clock()
            report = await elastic.bring_current(name, engine, lambda: elastic.activate(name, engine))
        except EngineDied as death:
            elastic.router.members.mark_dead(name, engine, death)
            raise
        loaded_s = report.seconds if isinstance(report, SyncReport) else clock() - awake_s
        return awake_s - began_s + loaded_s

    @asynccontextmanager
    async def _held(self, slot: str) -> AsyncIterator[None]:
        """Context in which the slot doesn't move."""
        self._moving.add(slot)
        try:
            yield
        finally:
            self._settle(slot)

    def _settle(self, slot: str) -> None:
        self._moving.discard(slot)
        self._settled.set()
        self._news.set()

    async def _until_settled(self, slot: str) -> None:
        while slot in self._moving:
            self._settled.clear()
            await self._settled.wait()

    def _update_clocks(self) -> None:
        for role, elastic in self._roles.items():
            self.clocks[role].set(not elastic.router.members.serving)

    def _learn_cost(self, move: Move, cost_s: float) -> None:
        way = move.source, move.target
        before_s = self._switch_s.get(way, cost_s)
        self._switch_s[way] = COST_MEMORY * before_s + (1 - COST_MEMORY) * cost_s

    async def _until_news(self) -> None:
        """Wait until a request waits for an engine, an engine is idle, or it is time to check."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_EVERY_S):
                await self._news.wait()
        self._news.clear()


@asynccontextmanager
async def _in_time(router: Router, name: str, what: str) -> AsyncIterator[None]:
    """Context with a time limit: an engine that exceeds it hangs and is marked dead. Raises EngineDied then."""
    engine = router.members.alive.get(name)
    try:
        async with asyncio.timeout(LEAVE_DEADLINE_S) as limit:
            yield
    except TimeoutError:
        if not limit.expired() or engine is None:
            raise
        death = EngineDied(f"it hangs: it did not {what} within {LEAVE_DEADLINE_S:g} s")
        router.members.mark_dead(name, engine, death)
        raise death from None


def spare(router: Router) -> str | None:
    """The engine with most requests, if it has several and one of them can migrate."""
    name = max(router.members.serving, key=router.load.__getitem__, default=None)
    staying = [ask for ask in router.load.requests(name) if not ask.moving] if name is not None else []
    return name if len(staying) > 1 and any(ask.movable for ask in staying) else None
