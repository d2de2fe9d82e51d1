"""Elastic pools: slots that serve now one role, now another. Carries out what balance.py decides; it decides nothing.

A slot holds an engine for each role of its pool and serves one of them. A move from A to B:

    A takes no new requests on it -> what it has goes on at A's other engines, or ends here -> A sleeps, if it can
    -> B wakes -> B is brought to the weights that its role serves -> B takes requests, and its share of those in flight

All on the event loop's clock. Routers send the requests; this room only says who serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from models.types import Engine, EngineDied, Sleeper
from scheduler.balance import NEVER_S, BalanceConfig, Move, Pool, RoleBacklog, Slot, decide
from scheduler.events import EventSink, NoEvents
from scheduler.health import BringCurrent, need_no_weights
from scheduler.router import Router
from scheduler.weight_push import SyncReport

log = logging.getLogger(__name__)

LEAST_COST_S = 0.05  # moved requests are prefilled again, which the measure doesn't see
COST_MEMORY = 0.7  # of what earlier switches took, in the estimate of the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRole:
    """One role of an elastic pool.

    router:        sends its requests; it starts with all engines serving, and with all slots' engines in it.
    bring_current: what a newcomer needs before its first request.
    max_rows:      of one engine.
    sleeps:        its engines share a device's memory: whoever doesn't serve gives it back.
    """

    router: Router
    bring_current: BringCurrent = need_no_weights
    max_rows: int = 1 << 30
    sleeps: bool = False


@runtime_checkable
class _Sleeps(Engine, Sleeper, Protocol):
    """An engine that can lend its memory."""


NothingPushed = Callable[[], AbstractAsyncContextManager[object]]  # within it no engine is pushed to


class ElasticPool:
    """The slots of a pool. `run` never returns; before it runs, slots stay as they are."""

    def __init__(
        self,
        name: str,
        slots: Mapping[str, Mapping[str, str]],
        roles: Mapping[str, ElasticRole],
        config: BalanceConfig,
        events: EventSink | None = None,
        nothing_pushed: NothingPushed = nullcontext,
    ) -> None:
        """slots: slot -> role -> the name of its engine. roles: in the order in which work goes through them; all slots
        begin with the first one."""
        self.name = name
        self.moves: Counter[str] = Counter()  # "policy->grm" -> how many
        self._engines = slots
        self._roles = roles
        self._config = config
        self._events = events or NoEvents()
        self._nothing_pushed = nothing_pushed
        first = next(iter(roles))
        self._serves = dict.fromkeys(slots, first)  # or will, once its move is done
        self._moving: set[str] = set()
        self._settled = asyncio.Event()  # a move ended
        self._news = asyncio.Event()
        self._switch_s: dict[tuple[str, str], float] = {}
        for role, elastic in roles.items():
            elastic.router.on_change = self._news.set
            for slot in slots if role != first else ():
                elastic.router.rest(slots[slot][role])

    @property
    def slots_by_role(self) -> dict[str, int]:
        """How many serve each role, or are on their way to it."""
        counts = Counter(self._serves.values())
        return {role: counts[role] for role in self._roles}

    async def run(self) -> None:
        """Look, move, wait for news. Raises what a move failed of, deaths aside."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    while (move := self._decide()) is not None:
                        self._begin(move)
                        tasks.create_task(self._carry_out(move))
                    await self._until_news()
        except BaseExceptionGroup as crashes:
            raise crashes.exceptions[0] from None

    async def bring_current(self, role: str, name: str, engine: Engine, admit: Callable[[], None]) -> None:
        """For who replaces dead engines: one whose slot serves another role lives on, and rests."""
        slot = next(slot for slot, engines in self._engines.items() if engines[role] == name)
        elastic = self._roles[role]

        def admit_and_serve() -> None:
            admit()
            elastic.router.serve(name, engine)

        while slot in self._moving:
            self._settled.clear()
            await self._settled.wait()
        if self._serves[slot] == role:
            await elastic.bring_current(name, engine, admit_and_serve)
        else:
            admit()

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self) -> Move | None:
        backlogs = {role: elastic.router.load.backlog(elastic.max_rows) for role, elastic in self._roles.items()}
        slots = [self._slot(slot, backlogs) for slot in self._engines]
        return decide(Pool(roles=backlogs, slots=slots, cost_s=self._cost_s, hysteresis=self._config.hysteresis))

    def _slot(self, slot: str, backlogs: Mapping[str, RoleBacklog]) -> Slot:
        role, engines = self._serves[slot], self._engines[slot]
        load, backlog = self._roles[role].router.load, backlogs[role]
        if slot in self._moving:
            return Slot(name=slot, role=role, able=frozenset({role}))
        able = frozenset(other for other, elastic in self._roles.items() if engines[other] in elastic.router.alive)
        stays = not self._config.hand_over and load[engines[role]]
        return Slot(
            name=slot,
            role=role,
            able=able,
            idle_s=load.idle_s(engines[role]),
            drain_s=backlog.longest * (backlog.step_s + backlog.row_s) if stays else 0.0,
        )

    def _cost_s(self, source: str, target: str) -> float:
        cost_s = max(self._switch_s.get((source, target), self._config.switch_s), LEAST_COST_S)
        if self._roles[target].bring_current is need_no_weights:
            return cost_s
        # Newcomers catch up one after another, and a push of the learner's waits behind them.
        return cost_s * (1 + sum(self._serves[slot] == target for slot in self._moving))

    # -- moving --------------------------------------------------------------------------------------------------------

    def _begin(self, move: Move) -> None:
        gain = f"gain {move.gain_s:.3g} s" if move.gain_s < NEVER_S / 2 else "the only way"
        log.info("%s %s: %s -> %s (%s, cost %.3g s): %s", self.name, move.slot, move.source, move.target,
                 gain, move.cost_s, move.reason)  # fmt: skip
        self._moving.add(move.slot)
        self._serves[move.slot] = move.target
        self._roles[move.source].router.rest(self._engines[move.slot][move.source])

    async def _carry_out(self, move: Move) -> None:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        try:
            cost_s = await self._leave(move) + await self._enter(move)
        except EngineDied as death:
            # The slot is the target's all the same: there its replacement will serve.
            log.warning("%s %s: %s", self.name, move.slot, death)
            return
        finally:
            self._moving.discard(move.slot)
            self._settled.set()
        self._learn_cost(move, cost_s)
        self.moves[f"{move.source}->{move.target}"] += 1
        self._events.span(f"{self.name} {move.slot}", f"switch {move.source}->{move.target}", started_s, clock(),
                          cost_s=round(cost_s, 4), gain_s=round(move.gain_s, 4), reason=move.reason)  # fmt: skip
        if self._config.hand_over:
            await self._roles[move.target].router.level()

    async def _leave(self, move: Move) -> float:
        """The slot's engine of the old role has no requests any more, and sleeps. Returns the seconds of the latter."""
        elastic, name = self._roles[move.source], self._engines[move.slot][move.source]
        if self._config.hand_over:
            await elastic.router.hand_over(name)
        await elastic.router.until_idle(name)
        engine, clock = elastic.router.alive.get(name), asyncio.get_running_loop().time
        left_s = clock()
        if elastic.sleeps and isinstance(engine, _Sleeps):
            try:
                async with self._nothing_pushed():
                    await _lull(name, engine)
            except EngineDied as death:  # it frees its memory as well
                elastic.router.bury(name, engine, death)
        return clock() - left_s

    async def _enter(self, move: Move) -> float:
        """The slot's engine of the new role is awake, current and serves. Returns the seconds that this took, less
        those of waiting for a learner that is between a step and its push."""
        elastic, name = self._roles[move.target], self._engines[move.slot][move.target]
        if (engine := elastic.router.alive.get(name)) is None:
            raise EngineDied(f"{name} died before its slot came to it")
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            if elastic.sleeps and isinstance(engine, _Sleeps):
                await engine.wake()
                await engine.resume()
            awake_s = clock()
            report = await elastic.bring_current(name, engine, lambda: elastic.router.serve(name, engine))
        except EngineDied as death:
            elastic.router.bury(name, engine, death)
            raise
        loaded_s = report.seconds if isinstance(report, SyncReport) else clock() - awake_s
        return awake_s - began_s + loaded_s

    def _learn_cost(self, move: Move, cost_s: float) -> None:
        way = move.source, move.target
        before_s = self._switch_s.get(way, cost_s)
        self._switch_s[way] = COST_MEMORY * before_s + (1 - COST_MEMORY) * cost_s

    async def _until_news(self) -> None:
        """Somebody waits for an engine, or an engine has run dry; or it is time to look again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.every_s):
                await self._news.wait()
        self._news.clear()


async def put_to_sleep(router: Router) -> None:
    """Engines of a role that doesn't serve yet; those of the next role start on the same devices."""
    for name, engine in router.alive.items():
        if isinstance(engine, _Sleeps):
            await _lull(name, engine)


async def _lull(name: str, engine: _Sleeps) -> None:
    """What it says is not what counts: its neighbour needs the memory."""
    await engine.pause()
    if (num_bytes := await engine.sleep()) == 0:
        log.warning("%s sleeps and freed no memory: its neighbour on the slot may find none", name)
    else:
        log.info("%s sleeps: %.2f GB became free", name, num_bytes / 1e9)
