"""The driver process in a simulation: it takes time, one thing after another, on a core that others may share."""

from __future__ import annotations

import asyncio
from collections import deque

from grmpipe.judge.grm import GrmPrompt, LocalGrm, PromptRenderer
from models.engines.simulated.simulated_rate import SharedDevice, SimulatedRate
from models.types import Completion, Generates, RequestContext, SamplingParams


class SimulatedDriver:
    """The simulated driver. Half of a request's time passes before it is sent (rendered, sent), half after the answer
    (parsed, written).

    device: its cores, if others run on them too.
    """

    def __init__(self, request_s: float, device: SharedDevice | None = None) -> None:
        self._half_s = request_s / 2
        self._device = device or SharedDevice()
        self._rate = SimulatedRate()
        self._queue: deque[tuple[float, asyncio.Future[None]]] = deque()  # (busy_s when it is done, its future)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self._rate.worked_s(asyncio.get_running_loop().time())

    async def attend(self) -> None:
        """Wait for the driver to do the work of a request. A cancelled wait still costs its time."""
        if not self._half_s:
            return
        loop = asyncio.get_running_loop()
        free_s = self._queue[-1][0] if self._queue else self._rate.worked_s(loop.time())
        turn: asyncio.Future[None] = loop.create_future()
        self._queue.append((free_s + self._half_s, turn))
        if len(self._queue) == 1:
            self._device.occupy(self)
        await turn

    def share_changed(self, share: float) -> None:
        self._rate.set_rate(asyncio.get_running_loop().time(), share)
        self._wait_for_next()

    def _wait_for_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._rate.when_s(self._queue[0][0]), self._done)

    def _done(self) -> None:
        self._timer = None
        _, turn = self._queue.popleft()
        if not turn.done():
            turn.set_result(None)
        if self._queue:
            self._wait_for_next()
        else:
            self._rate.set_rate(asyncio.get_running_loop().time(), 0.0)
            self._device.vacate(self)


class AttendedGrm(LocalGrm):
    """A GRM whose questions and answers pass through the driver."""

    def __init__(self, name: str, engine: Generates, renderer: PromptRenderer, driver: SimulatedDriver) -> None:
        super().__init__(name, engine, renderer, context_tokens=0)
        self._driver = driver

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        await self._driver.attend()
        completion = await super().ask(prompt, params, context)
        await self._driver.attend()
        return completion
