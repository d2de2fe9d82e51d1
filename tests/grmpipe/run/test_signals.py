"""A signal interrupts a run at any time from its start to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import handle_as_in_foreground

from grmpipe.run.signals import ENDS_NOW, StopRequest, end_by_signals, stop_by_signals, stoppable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    handle_as_in_foreground(*SIGNALS)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


async def ended(number: signal.Signals) -> str:
    """The end of a run that gets a signal while it waits."""
    with end_by_signals():
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            return "interrupted"
    return "went on"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_in_the_start_is_an_interruption(number: signal.Signals) -> None:
    assert asyncio.run(ended(number)) == "interrupted"


def test_the_first_signal_says_at_once_what_it_does_and_what_the_second_would(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def run() -> None:
        with end_by_signals(), stop_by_signals(lambda: None):
            os.kill(os.getpid(), signal.SIGINT)
            assert "SIGINT: the run ends with a checkpoint" in (said := capfd.readouterr().err), (
                "no event loop is needed"
            )
            assert "a second one ends it at once" in said

    asyncio.run(run())
    asyncio.run(ended(signal.SIGTERM))
    assert "SIGTERM: the run ends now, without a further checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_the_flow_asks_it_to_stop(number: signal.Signals) -> None:
    async def run() -> bool:
        stopped = asyncio.Event()
        with end_by_signals(), stop_by_signals(stopped.set):
            os.kill(os.getpid(), number)
            return await asyncio.wait_for(stopped.wait(), 5)

    assert asyncio.run(run())


def test_signals_that_come_together_are_one() -> None:
    """As `timeout` sends them, to the process and to its group."""

    async def run() -> int:
        asked: list[None] = []
        with end_by_signals(), stop_by_signals(lambda: asked.append(None)):
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.02)
        return len(asked)

    assert asyncio.run(run()) == 1


def test_a_signal_before_the_event_loop_is_a_keyboard_interrupt_and_handlers_come_back() -> None:
    with pytest.raises(KeyboardInterrupt), stoppable(), stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_from_elsewhere_is_met_where_the_run_is_next() -> None:
    async def run() -> str:
        try:
            with end_by_signals():
                await asyncio.sleep(5)
        except KeyboardInterrupt:
            return "interrupted"
        return "went on"

    request = StopRequest()
    assert request.ask() == ENDS_NOW
    with stoppable(request):
        assert asyncio.run(run()) == "interrupted"


def test_a_signal_after_the_flow_is_an_interruption_again() -> None:
    async def run() -> str:
        with end_by_signals():
            with stop_by_signals(lambda: None):
                await asyncio.sleep(0)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                return "interrupted"
        return "went on"

    assert asyncio.run(run()) == "interrupted"


STUBBORN = """
import asyncio, os, signal
from grmpipe.run import signals as interrupts
interrupts.LEAVE_AFTER_S, interrupts.ONE_SIGNAL_S = 0.2, 0.0

async def run():
    try:
        with interrupts.end_by_signals(), interrupts.stop_by_signals(lambda: os.kill(os.getpid(), {second})):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)
    finally:
        await asyncio.sleep(30)

asyncio.run(run())
"""


@pytest.mark.parametrize("second", ["signal.SIGINT", "signal.SIGTERM"])
def test_the_second_signal_waits_for_nothing_that_takes_long(second: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", STUBBORN.format(second=second)]
    assert subprocess.run(command, timeout=20, check=False, env=environment).returncode == 130


BLOCKED = """
import asyncio, os, signal, threading, time
from grmpipe.run import signals as interrupts
interrupts.LEAVE_AFTER_S, interrupts.ONE_SIGNAL_S = 0.2, 0.0

def press_twice():
    for _ in range(2):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

async def run():
    with interrupts.end_by_signals() as _, {context} as _:
        threading.Thread(target=press_twice, daemon=True).start()
        while True:
            try:
                time.sleep(30)
            except BaseException:
                pass  # a retry around everything

asyncio.run(run())
"""


@pytest.mark.parametrize("context", ["interrupts.stop_by_signals(print)", "open(os.devnull)"])
def test_the_second_ctrl_c_leaves_a_loop_that_a_users_code_blocks(context: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", BLOCKED.format(context=context)]
    ended = subprocess.run(command, timeout=20, check=False, env=environment, capture_output=True, text=True)
    assert ended.returncode == 130
    assert "leaving at once, without a checkpoint; the last one is kept" in ended.stderr


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def run() -> str:
        with end_by_signals(), stop_by_signals(lambda: None):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
            return "went on"

    assert asyncio.run(run()) == "went on"
