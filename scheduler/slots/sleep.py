"""Puts engines to sleep, so that others on their device can use the memory."""

import logging
from typing import Protocol, runtime_checkable

from grmpipe.models.types import Engine, Sleeper
from grmpipe.scheduler.routing.router import Router

log = logging.getLogger(__name__)


@runtime_checkable
class SleepingEngine(Engine, Sleeper, Protocol):
    """An engine that can free its device's memory."""


async def sleep_engine(name: str, engine: SleepingEngine, *, lends: bool = True) -> int:
    """Put an engine to sleep. Returns the bytes freed. `lends`: whether another process relies on them: if so, freeing
    none is a warning.
    """
    await engine.pause()
    if (num_bytes := await engine.sleep()) == 0 and lends:
        log.warning("%s sleeps but freed no memory: the other engine of the slot may lack it", name)
    else:
        log.info("%s sleeps: %.3g GB were freed", name, num_bytes / 1e9)
    return num_bytes


async def put_to_sleep(router: Router) -> None:
    """Put the engines of a role that doesn't serve yet to sleep; those of the next role start on the same devices."""
    for name, engine in router.members.alive.items():
        if isinstance(engine, SleepingEngine):
            await sleep_engine(name, engine)
