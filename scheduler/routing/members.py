"""The engines of a role: which live, which serve, which are replaced."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from grmpipe.models.types import Engine, EngineDied
from grmpipe.scheduler.events import EventSink

OnDeath = Callable[[str, EngineDied], bool]  # (name, cause of a dead engine) -> whether it will be replaced


def ignore_change() -> None:
    """The default for `on_change`."""


@dataclass(slots=True, kw_only=True)
class Death:
    """A death. blamed: whether a request was refused for it."""

    name: str  # the engine's
    cause: str
    blamed: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}"


@dataclass(slots=True, kw_only=True)
class Member:
    """What is known of the engines of one name, one after another. active: whether they may get requests."""

    active: bool = True
    coming: bool = False  # whether a replacement will come
    death: Death | None = None  # the last one
    num_stays: int = 1  # how often it began to serve: what it had cached before may be lost
    heard_s: float = -math.inf  # when it last answered a request, or began to
    waits: set[asyncio.Timeout] = field(default_factory=set)  # for answers that are still awaited


class RequestMoved(Exception):
    """A request was taken off its engine before it had begun there."""


class TrackedRequest:
    """Context in which an engine answers a request. Raises EngineDied at once if it is marked dead, and RequestMoved if
    the request is taken off it.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._waits = member.waits  # this engine's, not its replacement's
        self._wait = asyncio.timeout(None)
        self._is_taken_off = False

    async def __aenter__(self) -> TrackedRequest:
        await self._wait.__aenter__()
        self._waits.add(self._wait)
        return self

    def take_off(self) -> None:
        """End the request at this engine; it is cancelled there. Does nothing if it ends anyway."""
        if not self._wait.expired():
            self._is_taken_off = True
            self._waits.discard(self._wait)
            self._wait.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waits.discard(self._wait)
        try:
            await self._wait.__aexit__(kind, error, trace)
        except TimeoutError as ended:
            if self._is_taken_off:
                raise RequestMoved from ended
            assert self._member.death is not None
            raise EngineDied(self._member.death.cause) from ended


class RoleMembers:
    """The engines of one role, by name. An engine may be alive but inactive: its slot serves another role.

    alive, serving: the living ones, and those of them that get requests; another mapping after each change.
    on_death: asked once per death. on_change: called when an engine died; others may call it too.
    """

    on_death: OnDeath | None = None

    def __init__(self, role: str, engines: Mapping[str, Engine], events: EventSink) -> None:
        self.alive: Mapping[str, Engine] = dict(engines)
        self.serving: Mapping[str, Engine] = dict(engines)
        self.on_change: Callable[[], None] = ignore_change
        self._role = role
        self._events = events
        self._members = {name: Member() for name in engines}
        self._first_death: Death | None = None
        self._change = asyncio.Event()  # set when an engine comes, or won't come any more

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def admit(self, name: str, engine: Engine) -> None:
        """Add a new engine; it serves unless it is inactive."""
        assert name not in self.alive, f"{name} already serves"
        member = self._members.setdefault(name, Member())
        member.coming = False
        self.alive = {**self.alive, name: engine}
        if member.active:
            self._serve(name, engine)

    def activate(self, name: str, engine: Engine) -> None:
        """Let this engine serve again; it has the weights of the others."""
        if self.alive.get(name) is engine:
            self._members[name].active = True
            self._serve(name, engine)

    def deactivate(self, name: str) -> None:
        """Stop sending requests to this engine and to its replacement; those that it has may end."""
        self._members[name].active = False
        self.serving = _without(self.serving, name)

    def mark_dead(self, name: str, engine: Engine, death: EngineDied) -> Death:
        """Mark an engine as dead: requests no longer wait for its answers. Several callers may notice a death: the
        first call counts, and later ones don't affect its replacement. Returns the last death under this name.
        """
        member = self._members[name]
        if self.alive.get(name) is not engine:
            assert member.death is not None, name
            return member.death
        member.death = noted = Death(name=name, cause=str(death))
        self._first_death = self._first_death or noted
        self.alive, self.serving = _without(self.alive, name), _without(self.serving, name)
        now_s = asyncio.get_running_loop().time()
        for wait in member.waits:
            wait.reschedule(now_s)
        member.waits = set()
        self._events.span(name, "died", now_s, now_s, cause=str(death))
        if self.on_death is not None and self.on_death(name, death):
            member.coming = True
        self.on_change()
        return noted

    def give_up(self, name: str) -> None:
        """This engine won't be replaced. If it was the last, waiting requests raise EngineDied."""
        self._members[name].coming = False
        self._change.set()

    @property
    def have_a_future(self) -> bool:
        """Whether an engine lives or will be replaced."""
        return bool(self.alive) or any(member.coming for member in self._members.values())

    async def until_served(self) -> None:
        """Return once an engine serves. Raises EngineDied if none serves, none is inactive, and none will come."""
        while not self.serving:
            if not self.have_a_future:
                first = self._first_death or "none was started"
                raise EngineDied(f"all engines of role {self._role} died; the first: {first}")
            self._change.clear()
            await self._change.wait()

    def _serve(self, name: str, engine: Engine) -> None:
        self._members[name].num_stays += 1
        self.serving = {**self.serving, name: engine}
        self._change.set()


def _without(engines: Mapping[str, Engine], name: str) -> Mapping[str, Engine]:
    return {other: engine for other, engine in engines.items() if other != name}
