"""Limits on the requests of each engine, by its pressure: additive increase, halved on thrashing (AIMD).

Requests above the limits wait here, before an engine is chosen. Engines that don't report pressure have no limit.
"""

from __future__ import annotations

import asyncio
import math

from models.priority_gate import PriorityGate
from models.types import EngineDied, Pressure, ReportsPressure

LOOK_EVERY_S = 1.0  # interval between checks of an engine's pressure, when its requests end
HIGH_KV_SHARE = 0.95  # above it a limit doesn't rise
NEAR = 0.9  # of the limit at which it last thrashed: up to there a limit rises fast
PROBE_ROUNDS = 8  # rounds between two steps above it; a round is as many ended requests as the limit


class Aimd:
    """One engine's limit; infinite until it thrashes for the first time. Pure."""

    def __init__(self) -> None:
        self.limit = math.inf
        self._ceiling = math.inf  # rows at which it last thrashed
        self._num_preempted = 0
        self._num_ended = 0  # since the last step
        self._most_in_flight = 0  # since the last check
        self._settling = False  # requests sent before the limit fell are still there, or were at the last check

    def update(self, pressure: Pressure, in_flight: int, held_back: bool) -> None:
        """Update the limit by an engine's pressure, and by whether the limit held a request back since the last check.

        Preempted requests since the last check halve the limit, once its last fall has taken effect. A limit that held
        requests back without pressure rises: at every check by half of the distance to nine tenths of the last
        thrashing; above that rarely by one; above the last thrashing by an eighth every round.
        """
        thrashed = pressure.num_preempted > self._num_preempted
        self._num_preempted = pressure.num_preempted
        self._most_in_flight = max(self._most_in_flight, in_flight)
        settling, self._settling = self._settling, in_flight > self.limit
        if settling or self._settling:
            self._most_in_flight = 0
            return
        if thrashed:
            self._settling = True
            # Waiting requests were preempted.
            fitting = pressure.num_running if pressure.num_waiting else self._most_in_flight
            self._ceiling = min(self.limit, max(fitting, 1))
            self.limit = max(1.0, self._ceiling / 2)
        elif held_back and pressure.kv_share < HIGH_KV_SHARE:
            self._rise()
        self._most_in_flight = 0

    def ended(self, in_flight: int) -> None:
        """A request left the engine, which had `in_flight` with it."""
        self._num_ended += 1
        self._most_in_flight = max(self._most_in_flight, in_flight)

    def _rise(self) -> None:
        gap, known = NEAR * self._ceiling - self.limit, self.limit < self._ceiling
        if gap > 1:
            self.limit += gap / 2
        elif self._num_ended >= self.limit * (PROBE_ROUNDS if known else 1):
            self.limit += 1 if known else max(1.0, self.limit / 8)
            self._num_ended = 0


class Concurrency:
    """The limits of a role's engines by name, and the waiting requests: lowest priority number first, then the
    oldest.
    """

    def __init__(self) -> None:
        self._limits: dict[str, Aimd] = {}
        self._num_limited = 0
        self._held_back: set[str] = set()  # engines whose limit held a request back since the last check
        self._looked_s: dict[str, float] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._waiting = PriorityGate()

    @property
    def limits_anybody(self) -> bool:
        """Whether any engine has a finite limit; False until one thrashes."""
        return self._num_limited > 0

    def has_room(self, name: str, in_flight: int) -> bool:
        if (limit := self._limits.get(name)) is None or in_flight < limit.limit:
            return True
        self._held_back.add(name)
        return False

    def limit(self, name: str) -> float:
        return limit.limit if (limit := self._limits.get(name)) else math.inf

    async def wait_for_room(self, priority: int) -> None:
        """Return when there may be room."""
        await self._waiting.wait(priority, self._waiting.let_one)

    def left(self, name: str, engine: object, in_flight: int) -> None:
        """A request left an engine, which now has `in_flight`: let the next one go, and check the pressure if it is
        time.
        """
        self._waiting.let_one()
        limit = self._limits.setdefault(name, Aimd())
        limit.ended(in_flight + 1)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._looked_s.get(name, -math.inf) < LOOK_EVERY_S:
            return
        self._looked_s[name] = now_s
        if isinstance(engine, ReportsPressure):
            look = asyncio.create_task(self._look(name, engine, limit, in_flight))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    def changed(self) -> None:
        """Engines or limits changed."""
        self._waiting.let_all()

    def forget(self, name: str) -> None:
        """Forget an engine that died: its replacement is another."""
        self._limits.pop(name, None)
        self._looked_s.pop(name, None)
        self._count()
        self.changed()

    async def _look(self, name: str, engine: ReportsPressure, limit: Aimd, in_flight: int) -> None:
        try:
            pressure = await engine.pressure()
        except EngineDied:
            return  # its requests report the death
        if pressure is None:
            self._looked_s[name] = math.inf  # it doesn't report pressure
            return
        limit.update(pressure, in_flight, name in self._held_back)
        self._held_back.discard(name)
        self._count()
        self.changed()

    def _count(self) -> None:
        self._num_limited = sum(limit.limit < math.inf for limit in self._limits.values())
