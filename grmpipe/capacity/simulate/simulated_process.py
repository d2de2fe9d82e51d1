"""Processes that only take time: one that does one thing after another, and the driver process of a run."""

import asyncio

from grmpipe.judge.grm import GrmPrompt, LocalGrm, PromptRenderer
from grmpipe.models.engines.simulated.simulated_rate import SharedDevice, SimulatedRate
from grmpipe.models.types import Completion, Generates, RequestContext, SamplingParams


class SimulatedProcess:
    """A process that does one thing after another.

    device: if it shares one with other processes.
    """

    def __init__(self, device: SharedDevice | None = None) -> None:
        self._device = device or SharedDevice()
        self._turn = asyncio.Lock()
        self._rate = SimulatedRate()
        self._pace_changed = asyncio.Event()

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self._rate.measure_work_s(asyncio.get_running_loop().time())

    def share_changed(self, share: float) -> None:
        self._rate.set_rate(asyncio.get_running_loop().time(), share)
        self._pace_changed.set()

    async def _spend(self, work_s: float) -> None:
        clock = asyncio.get_running_loop().time
        end_s = self._rate.measure_work_s(clock()) + work_s
        self._device.occupy(self)
        try:
            while (when_s := self._rate.when_s(end_s)) > clock():
                self._pace_changed.clear()
                try:
                    async with asyncio.timeout_at(when_s):
                        await self._pace_changed.wait()
                except TimeoutError:
                    break
        finally:
            self._device.vacate(self)
            self._rate.set_rate(clock(), 0.0)


class SimulatedDriver(SimulatedProcess):
    """The simulated driver. Half of a request's time passes before it is sent (rendered, sent), half after the answer
    (parsed, written).

    device: its cores, if others run on them too.
    """

    def __init__(self, request_s: float, device: SharedDevice | None = None) -> None:
        super().__init__(device)
        self._half_s = request_s / 2

    async def attend(self) -> None:
        """Wait for the driver to do the work of a request."""
        if self._half_s:
            async with self._turn:
                await self._spend(self._half_s)


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

    async def ask_verdict(
        self, prompt: GrmPrompt, judgement: Completion, params: SamplingParams, context: RequestContext
    ) -> Completion:
        """Nothing is asked: the simulated share of unparseable judgements is of those that stay without a verdict."""
        return judgement
