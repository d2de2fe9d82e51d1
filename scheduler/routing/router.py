"""A router: many engines of one role as one Engine. Least load, siblings together, a trajectory's turns where its cache
is, retries elsewhere. Starts no engine.

It outlives its engines: requests wait while a replacement starts. An engine may be alive but inactive: its slot serves
another role, and it gets no requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from models.types import (
    Completion,
    Engine,
    EngineDied,
    EngineRefused,
    GroupLink,
    KeepsTrajectories,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)
from scheduler.events import EventSink, NoEvents
from scheduler.routing.concurrency import Concurrency
from scheduler.routing.expected_load import LoadEstimate
from scheduler.routing.in_flight import RoleLoad
from scheduler.routing.migration import Continuation, PartialRequest, can_be_continued

T = TypeVar("T")


def ignore_change() -> None:
    """The default for `on_change`."""


NO_REQUEST = "health look"  # no request has this id: aborting it tests an engine and changes nothing


class RequestKillsEngines(EngineRefused):
    """Several engines died, one after another, while they served the same request."""


OnDeath = Callable[[str, EngineDied], bool]  # (name, cause of a dead engine) -> whether it will be replaced


class Router:
    """Sends each request to one engine. A dead engine gets no more requests; its requests are sampled again elsewhere,
    with the same request_id and seed. A request during which too many engines died is refused: it may kill engines.

    continuation: how requests migrate with their tokens; without it they don't migrate.
    on_change: called when a request waits for an engine, an engine died, or an engine has no request left.
    on_kills: called once per death with the name of an engine that died with a request that is refused for it.
    """

    on_death: OnDeath | None = None
    on_kills: Callable[[str], None] | None = None
    max_deaths_per_request = 2

    def __init__(
        self,
        role: str,
        engines: Mapping[str, Engine],
        events: EventSink | None = None,
        continuation: Continuation | None = None,
    ) -> None:
        self.load = RoleLoad(role)
        self._work = LoadEstimate(engines)
        self._concurrency = Concurrency()
        self.on_change: Callable[[], None] = ignore_change
        self._role = role
        self._seats = {name: _Seat(engine=engine) for name, engine in engines.items()}
        self._first_death: _Death | None = None
        self._events = events or NoEvents()
        self._continuation = continuation
        self._where: dict[str, str] = {}  # request_id -> engine
        self._emptied = asyncio.Event()  # set when an engine has no request left
        self._change = asyncio.Event()  # set when an engine comes, or won't come any more

    @property
    def alive(self) -> Mapping[str, Engine]:
        """Living engines by name; some may be inactive."""
        return {name: seat.engine for name, seat in self._seats.items() if seat.engine is not None}

    @property
    def serving(self) -> Mapping[str, Engine]:
        """Engines that get requests, by name."""
        return {name: engine for name, engine in self.alive.items() if self._seats[name].active}

    @property
    def in_use(self) -> Mapping[str, Engine]:
        """Engines that serve, and inactive ones whose last requests are ending: they need new weights."""
        return {name: engine for name, engine in self.alive.items() if self._seats[name].active or self.load[name]}

    def heard_s(self, name: str) -> float:
        """When an engine of this name last answered a request, or began to, on the loop's clock."""
        return self._seats[name].heard_s

    def admit(self, name: str, engine: Engine) -> None:
        """Add a new engine; it serves unless it is inactive."""
        seat = self._seats.setdefault(name, _Seat())
        assert seat.engine is None, f"{name} already serves"
        seat.engine, seat.coming = engine, False
        if seat.active:
            self._work.came(name)
        self._concurrency.changed()
        self._change.set()

    def deactivate(self, name: str) -> None:
        """Stop sending requests to this engine and to its replacement; those that it has may end."""
        self._seats[name].active = False
        self._work.went(name)

    def activate(self, name: str, engine: Engine) -> None:
        """Let this engine serve again; it has the weights of the others."""
        if self._seats[name].engine is engine:
            self._seats[name].active = True
            self._work.came(name)
            self.load.woke(name)
            self._concurrency.changed()
            self._change.set()

    async def until_idle(self, name: str) -> None:
        """Return once an engine has no request in flight."""
        while self.load[name]:
            self._emptied.clear()
            await self._emptied.wait()

    async def migrate(self, name: str, count: int | None = None) -> int:
        """Migrate requests of an engine to the others, the latest first; all, or at most `count`.

        Returns how many were asked to migrate: 0 if no other engine serves. They are still on their way.
        """
        engine = self._seats[name].engine
        if engine is None or self._continuation is None or not (self.serving.keys() - {name}):
            return 0
        movable = [ask for ask in self.load.requests(name) if ask.movable and not ask.moving]
        movable.sort(key=lambda ask: ask.begun_s if ask.begun_s is not None else math.inf, reverse=True)
        for ask in (going := movable[:count]):
            ask.moving = True
        try:
            await asyncio.gather(*(engine.abort(ask.request_id) for ask in going))
        except EngineDied as death:
            self.mark_dead(name, engine, death)
        return len(going)

    async def rebalance(self) -> None:
        """Even out the number of requests on all engines that serve, for a new one."""
        if not (serving := self.serving):
            return
        fair = -(-sum(self.load[name] for name in serving) // len(serving))
        over = {name: self.load[name] - fair for name in serving}
        await asyncio.gather(*(self.migrate(name, surplus) for name, surplus in over.items() if surplus > 0))

    def mark_dead(self, name: str, engine: Engine, death: EngineDied) -> None:
        """Mark an engine as dead: requests no longer wait for its answers. Several callers may notice a death: the
        first call counts, and later ones don't affect its replacement.
        """
        seat = self._seats[name]
        if seat.engine is not engine:
            return
        seat.engine, seat.death = None, _Death(name=name, cause=str(death))
        self._first_death = self._first_death or seat.death
        self._work.went(name)
        self._concurrency.forget(name)
        now_s = asyncio.get_running_loop().time()
        for wait in seat.waits:
            wait.reschedule(now_s)
        seat.waits = set()
        self._events.span(name, "died", now_s, now_s, cause=str(death))
        if self.on_death is not None and self.on_death(name, death):
            seat.coming = True
        self.on_change()

    def give_up(self, name: str) -> None:
        """This engine won't be replaced. If it was the last, waiting requests raise EngineDied."""
        self._seats[name].coming = False
        self._change.set()

    async def until_served(self) -> None:
        """Return once an engine serves. Raises EngineDied if none serves, none is inactive, and none will come."""
        if self.serving:
            return
        self.load.num_waiting += 1
        self.on_change()
        try:
            while not self.serving:
                if not self._has_a_future:
                    first = self._first_death or "none was started"
                    raise EngineDied(f"all engines of role {self._role} died; the first: {first}")
                self._change.clear()
                await self._change.wait()
        finally:
            self.load.num_waiting -= 1

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Raises EngineDied only if no engine is left and none will come, RequestKillsEngines if
        `max_deaths_per_request` engines died with this request.
        """
        once, partial = _Once(on_first_token), PartialRequest(tuple(prompt_ids), params)
        deaths: list[_Death] = []
        while True:
            among = await self._until_room(context.priority)
            name, expected = self._place(among, partial, context)
            engine, served = self.serving[name], False
            try:
                if deaths:
                    await engine.abort(NO_REQUEST)  # an engine that is dead already isn't killed by this request
                served = True
                part, moving = await self._generate_on(name, engine, partial, context, once)
            except EngineDied as death:
                self.mark_dead(name, engine, death)
                if served:
                    deaths.append(self._last_death_of(name))
                if len(deaths) >= self.max_deaths_per_request and self._has_a_future:
                    raise self._refusal(context.request_id, deaths) from death
                continue
            finally:
                self._work.give_back(name, expected)
                self._concurrency.left(name, engine, self.load[name])
            if moving and part.finish_reason == "abort" and self._continuation is not None:
                partial.go_on(part, self._continuation)
                continue
            whole = partial.whole(part, self._continuation)
            if whole.finish_reason != "abort":
                self.load.rates.ended(whole.num_tokens)
                self._work.ended(whole.num_tokens)
                if context.trajectory_id:
                    self._work.keeps(name, context.trajectory_id, len(prompt_ids) + len(whole.token_ids))
            return whole

    async def abort(self, request_id: str) -> None:
        name = self._where.get(request_id)
        if name is None or (engine := self._seats[name].engine) is None:
            return
        for ask in self.load.requests(name):
            ask.moving = ask.moving and ask.request_id != request_id
        try:
            await engine.abort(request_id)
        except EngineDied as death:
            self.mark_dead(name, engine, death)

    def end_trajectory(self, trajectory_id: str) -> None:
        """No further turn of this trajectory comes: the engine that has its last one may free it."""
        engine = self.alive.get(self._work.ended_trajectory(trajectory_id))
        if isinstance(engine, KeepsTrajectories):
            engine.end_trajectory(trajectory_id)

    async def pause(self) -> None:
        await self._on_all(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._on_all(lambda engine: engine.resume())

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        assert link is None, "each member of a group needs a different rank"
        await self._on_all(lambda engine: engine.begin_weights())

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._on_all(lambda engine: engine.load_bucket(bucket))

    async def commit_weights(self, version: int) -> WeightReceipt:
        """The receipt that all engines agree on."""
        receipts = await self._on_all(lambda engine: engine.commit_weights(version))
        first, *others = receipts.items()
        for name, receipt in others:
            if receipt != first[1]:
                raise RuntimeError(f"engines {first[0]} and {name} of {self._role} received different weights")
        return first[1]

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        while True:
            await self.until_served()
            engine = self.serving[name := self._work.least()]
            try:
                return await engine.score(token_ids)
            except EngineDied as death:
                self.mark_dead(name, engine, death)

    @property
    def _has_a_future(self) -> bool:
        """Whether an engine lives or will be replaced."""
        return any(seat.engine is not None or seat.coming for seat in self._seats.values())

    def _last_death_of(self, name: str) -> _Death:
        death = self._seats[name].death
        assert death is not None, name
        return death

    def _refusal(self, request_id: str, deaths: Sequence[_Death]) -> RequestKillsEngines:
        """The refusal of a request that is blamed for these deaths; other requests may be blamed for the same ones."""
        for death in deaths:
            if not death.blamed and self.on_kills is not None:
                self.on_kills(death.name)
            death.blamed = True
        names = ", ".join(death.name for death in deaths)
        return RequestKillsEngines(f"{request_id} killed {len(deaths)} engines: {names}; the last one: {deaths[-1]}")

    async def _until_room(self, priority: int) -> Collection[str] | None:
        """Wait for engines that serve and may take a request now, and return them; None: all that serve. Raises like
        `until_served`.
        """
        while True:
            await self.until_served()
            if not self._concurrency.limits_anybody:
                return None
            if names := [name for name in self.serving if self._concurrency.has_room(name, self.load[name])]:
                return names
            self.load.num_waiting += 1
            try:
                await self._concurrency.wait_for_room(priority)
            finally:
                self.load.num_waiting -= 1

    def _place(
        self, among: Collection[str] | None, partial: PartialRequest, context: RequestContext
    ) -> tuple[str, float]:
        """The engine for a request, and the tokens that it is expected to cost there."""
        if partial.moved:
            return self._work.place_anywhere(partial.prompt_ids, partial.params, among)
        return self._work.place(context.group_id, partial.prompt_ids, partial.params, among, context.trajectory_id)

    async def _generate_on(
        self, name: str, engine: Engine, partial: PartialRequest, context: RequestContext, once: _Once
    ) -> tuple[Completion, bool]:
        """What the engine sampled, and whether the rest continues elsewhere."""
        start_s = asyncio.get_running_loop().time()
        ask = self.load.take(name, context.request_id, can_be_continued(partial.params), partial.num_sampled)
        self._where[context.request_id] = name
        num_tokens: int | None = None
        seat = self._seats[name]
        waits = seat.waits  # of this engine, not of its replacement

        def on_first_token() -> None:
            self.load.began(name, ask)
            seat.heard_s = asyncio.get_running_loop().time()
            once()

        engine_context = replace(context, num_sampled=partial.num_sampled) if partial.num_sampled else context
        try:
            async with asyncio.timeout(None) as wait:
                waits.add(wait)
                part = await engine.generate(partial.prompt_ids, partial.params, engine_context, on_first_token)
            num_tokens = part.num_tokens
            seat.heard_s = asyncio.get_running_loop().time()
        except TimeoutError as error:
            if wait.expired():
                raise EngineDied(self._last_death_of(name).cause) from error
            raise
        finally:
            waits.discard(wait)
            self.load.ended(name, ask, num_tokens)
            self._where.pop(context.request_id, None)
            if not self.load[name]:
                self._emptied.set()
                self.on_change()
        end_s = asyncio.get_running_loop().time()
        seen: dict[str, str | int | float] = {"request": context.request_id, "num_tokens": num_tokens}
        if ask.begun_s is not None:
            seen["first_token_s"] = round(ask.begun_s - start_s, 6)  # seconds after the start
        self._events.span(name, context.role, start_s, end_s, **seen)
        return part, ask.moving

    async def _on_all(self, ask: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        """Call every living engine; those that die meanwhile are left out, as long as one answers."""
        answers: dict[str, T] = {}

        async def ask_one(name: str, engine: Engine) -> None:
            try:
                answers[name] = await ask(engine)
            except EngineDied as death:
                self.mark_dead(name, engine, death)

        while not answers:
            await self.until_served()
            await asyncio.gather(*(ask_one(name, engine) for name, engine in self.alive.items()))
        return answers


@dataclass(slots=True, kw_only=True)
class _Seat:
    """What is known of one engine after another of a name.

    engine: None from its death until its replacement comes. active: whether it may get requests; kept over a death.
    """

    engine: Engine | None = None
    active: bool = True
    coming: bool = False  # a replacement
    death: _Death | None = None  # the last
    heard_s: float = -math.inf  # when it last answered a request, or began to
    waits: set[asyncio.Timeout] = field(default_factory=set)  # of answers that are waited for


@dataclass(slots=True, kw_only=True)
class _Death:
    """A death during a request. blamed: whether the request was refused for it."""

    name: str  # of the engine
    cause: str
    blamed: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}"


class _Once:
    """A callback that runs once: a retried request has two first tokens."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._called = False

    def __call__(self) -> None:
        if not self._called:
            self._called = True
            self._callback()
