"""Scorers of one role as one Scorer: sends waiting requests in batches, replaces dead members."""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from grmpipe.models.types import EngineDied
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.scheduler.processes.actors import ActorDied, ActorRanks

log = logging.getLogger(__name__)

Restart = Callable[[int], Awaitable[None]]  # rank -> restarts the member on its seat, after ending what is left of it


@dataclass(order=True, slots=True)
class ScoreRequest:
    """A sequence to score; the lowest priority first, then the oldest."""

    priority: int
    turn: int
    token_ids: tuple[int, ...] = field(compare=False)
    answer: asyncio.Future[float] = field(compare=False)


class ScorerPool:
    """A pool of scorers. Each member takes one batch at a time; while all are busy, requests gather in the next one.

    A dead member's batch goes to the others, or waits for its replacement.

    restart, max_replacements: how dead members are replaced, and how many tries the run has.
    max_batch_tokens: most in one call; a longer sequence is sent alone.
    """

    def __init__(
        self,
        role: str,
        members: ActorRanks,
        restart: Restart,
        max_replacements: int,
        max_batch_tokens: int,
        events: EventSink | None = None,
    ) -> None:
        self.role = role
        self.num_replaced = 0
        self._members = members
        self._restart = restart
        self._tries_left = max_replacements
        self._max_batch_tokens = max_batch_tokens
        self._events = events or NoEvents()
        self._idle = list(range(members.size))
        self._num_alive = members.size
        self._num_coming = 0
        self._waiting: list[ScoreRequest] = []
        self._turns = itertools.count()
        self._deaths: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_sending = False

    async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
        """Score a sequence. Raises EngineDied only if no member is left and none will come."""
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, ScoreRequest(priority, next(self._turns), tuple(token_ids), answer))
        if not self._is_sending:  # at the end of this tick, so that concurrent requests are sent together
            self._is_sending = True
            asyncio.get_running_loop().call_soon(self._send)
        return await answer

    def _send(self) -> None:
        """Send a batch to each idle member, while there are requests."""
        self._is_sending = False
        if not self._num_alive and not self._num_coming:
            self._fail_all()
        while self._idle and (batch := self._next_batch()):
            self._spawn(self._serve(self._idle.pop(), batch))

    def _next_batch(self) -> list[ScoreRequest]:
        batch: list[ScoreRequest] = []
        num_tokens = 0
        while self._waiting:
            ask = self._waiting[0]
            if batch and num_tokens + len(ask.token_ids) > self._max_batch_tokens:
                break
            heapq.heappop(self._waiting)
            if not ask.answer.done():  # no longer waited for if cancelled
                batch.append(ask)
                num_tokens += len(ask.token_ids)
        return batch

    async def _serve(self, rank: int, batch: Sequence[ScoreRequest]) -> None:
        clock = asyncio.get_running_loop().time
        start_s, sequences = clock(), [ask.token_ids for ask in batch]
        try:
            scores = cast(list[float], await self._members.call(rank, "scores", sequences))
        except ActorDied as death:
            self._mark_dead(rank, death, batch)
            return
        except Exception as error:
            for ask in batch:
                settle(ask, error)
        else:
            for ask, score in zip(batch, scores, strict=True):
                settle(ask, score)
            num_tokens = sum(map(len, sequences))
            self._events.span(self._name(rank), self.role, start_s, clock(), num_tokens=num_tokens)
        self._idle.append(rank)
        self._send()

    def _mark_dead(self, rank: int, death: ActorDied, batch: Sequence[ScoreRequest]) -> None:
        log.warning("%s", death)
        self._num_alive -= 1
        self._deaths.append(str(death))
        for ask in batch:
            heapq.heappush(self._waiting, ask)
        if self._tries_left > 0:
            self._num_coming += 1
            self._spawn(self._replace(rank))
        self._send()

    async def _replace(self, rank: int) -> None:
        while self._tries_left > 0:
            self._tries_left -= 1
            try:
                await self._restart(rank)
            except Exception as failure:
                log.warning("%s could not be replaced: %s", self._name(rank), failure)
                continue
            self.num_replaced += 1
            self._num_alive += 1
            self._idle.append(rank)
            break
        self._num_coming -= 1
        self._send()

    def _fail_all(self) -> None:
        first = self._deaths[0] if self._deaths else "none was started"
        for ask in self._waiting:
            settle(ask, EngineDied(f"all scorers of role {self.role} died; the first: {first}"))
        self._waiting.clear()

    def _name(self, rank: int) -> str:
        return f"{self.role}-{rank}"

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def settle(ask: ScoreRequest, result: float | Exception) -> None:
    if ask.answer.done():
        return
    if isinstance(result, Exception):
        ask.answer.set_exception(result)
    else:
        ask.answer.set_result(result)
