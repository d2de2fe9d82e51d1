"""Many engines of one role seen as one Engine: least load, siblings together, retries elsewhere. Starts no engine.

It outlives its engines: while one that replaces them is on its way, requests wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from models.types import (
    Completion,
    Engine,
    EngineDied,
    GroupLink,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)
from scheduler.events import EventSink, NoEvents

T = TypeVar("T")
MAX_IMBALANCE = 16  # requests that siblings may wait behind for the sake of their shared prefix
GROUPS_REMEMBERED = 4096


OnDeath = Callable[[str, EngineDied], bool]  # hears of a dead engine by name; says whether it will be replaced


class Router:
    """Sends each request to one engine. A dead engine is never asked again; its requests are drawn anew elsewhere,
    under the same request_id and seed."""

    on_death: OnDeath | None = None

    def __init__(self, role: str, engines: Mapping[str, Engine], events: EventSink | None = None) -> None:
        self._role = role
        self._alive = dict(engines)
        self._events = events or NoEvents()
        self._in_flight: Counter[str] = Counter()
        self._where: dict[str, str] = {}  # request_id -> engine
        self._home: OrderedDict[str, str] = OrderedDict()  # group_id -> engine
        self._deaths: list[str] = []
        self._coming: set[str] = set()  # those that will be replaced
        self._change = asyncio.Event()  # somebody came, or won't come any more

    @property
    def alive(self) -> Mapping[str, Engine]:
        """The engines that serve, by name."""
        return dict(self._alive)

    def admit(self, name: str, engine: Engine) -> None:
        """A new engine serves from now on."""
        assert name not in self._alive, f"{name} serves already"
        self._alive[name] = engine
        self._coming.discard(name)
        self._change.set()

    def bury(self, name: str, engine: Engine, death: EngineDied) -> None:
        """An engine is dead. Many may notice: the first call counts, and none of them harms who came in its place."""
        if self._alive.get(name) is not engine:
            return
        del self._alive[name]
        self._deaths.append(f"{name}: {death}")
        now_s = asyncio.get_running_loop().time()
        self._events.span(name, "died", now_s, now_s, cause=str(death))
        if self.on_death is not None and self.on_death(name, death):
            self._coming.add(name)

    def give_up(self, name: str) -> None:
        """Nobody will replace this one. If it was the last, requests that wait raise EngineDied."""
        self._coming.discard(name)
        self._change.set()

    async def until_served(self) -> None:
        """Return once an engine serves. Raises EngineDied when none does, and none is on its way."""
        while not self._alive:
            if not self._coming:
                first = self._deaths[0] if self._deaths else "there was none to begin with"
                raise EngineDied(f"all engines of role {self._role} died; the first: {first}")
            self._change.clear()
            await self._change.wait()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Raises EngineDied only when no engine is left, and none will come."""
        once = _Once(on_first_token)
        while True:
            await self.until_served()
            name = self._choose(context.group_id)
            engine = self._alive[name]
            try:
                return await self._generate_on(name, engine, prompt_ids, params, context, once)
            except EngineDied as death:
                self.bury(name, engine, death)

    async def abort(self, request_id: str) -> None:
        engine = self._alive.get(name := self._where.get(request_id, ""))
        if engine is None:
            return
        try:
            await engine.abort(request_id)
        except EngineDied as death:
            self.bury(name, engine, death)

    async def pause(self) -> None:
        await self._on_all(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self._on_all(lambda engine: engine.resume())

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        assert link is None, "each member of a group needs a rank of its own"
        await self._on_all(lambda engine: engine.begin_weights())

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._on_all(lambda engine: engine.load_bucket(bucket))

    async def commit_weights(self, version: int) -> WeightReceipt:
        """The receipt that all engines agree on."""
        receipts = await self._on_all(lambda engine: engine.commit_weights(version))
        first, *others = receipts.items()
        for name, receipt in others:
            if receipt != first[1]:
                raise RuntimeError(f"engines {first[0]} and {name} of {self._role} took different weights")
        return first[1]

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        while True:
            await self.until_served()
            engine = self._alive[name := self._least_loaded()]
            try:
                return await engine.score(token_ids)
            except EngineDied as death:
                self.bury(name, engine, death)

    def _choose(self, group_id: str) -> str:
        """Where its siblings are, unless that engine is far behind the least loaded one."""
        name = self._least_loaded()
        home = self._home.get(group_id)
        if home in self._alive and self._in_flight[home] - self._in_flight[name] <= MAX_IMBALANCE:
            name = home
        self._home[group_id] = name
        self._home.move_to_end(group_id)
        if len(self._home) > GROUPS_REMEMBERED:
            self._home.popitem(last=False)
        return name

    def _least_loaded(self) -> str:
        return min(self._alive, key=lambda name: self._in_flight[name])

    async def _generate_on(
        self,
        name: str,
        engine: Engine,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None],
    ) -> Completion:
        start_s = asyncio.get_running_loop().time()
        self._in_flight[name] += 1
        self._where[context.request_id] = name
        try:
            completion = await engine.generate(prompt_ids, params, context, on_first_token)
        finally:
            self._in_flight[name] -= 1
            self._where.pop(context.request_id, None)
        end_s = asyncio.get_running_loop().time()
        num_tokens = len(completion.token_ids)
        self._events.span(name, context.role, start_s, end_s, request=context.request_id, num_tokens=num_tokens)
        return completion

    async def _on_all(self, ask: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        """Ask every living engine; those that die meanwhile are left out, as long as one answers."""
        answers: dict[str, T] = {}

        async def ask_one(name: str, engine: Engine) -> None:
            try:
                answers[name] = await ask(engine)
            except EngineDied as death:
                self.bury(name, engine, death)

        while not answers:
            await self.until_served()
            await asyncio.gather(*(ask_one(name, engine) for name, engine in self.alive.items()))
        return answers


class _Once:
    """A retried request has two first tokens; the caller hears of one."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._told = False

    def __call__(self) -> None:
        if not self._told:
            self._told = True
            self._tell()
