"""Ctrl-C and SIGTERM, made a request to stop between two optimizer steps. Stops nothing itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def asked_to_stop(stop: Callable[[], None]) -> Iterator[None]:
    """The first signal calls `stop`, which sees to a checkpoint; the second ends the process at once, without."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def listen_no_more() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def first() -> None:
        listen_no_more()
        stop()

    for number in signals:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        listen_no_more()
