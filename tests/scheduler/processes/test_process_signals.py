"""Processes that start deaf to signals, and those that they start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from grmpipe.scheduler.processes.process_signals import block_signals, kill_with_children

FAMILY = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True).wait()"


def test_a_process_started_deaf_outlives_signals_until_it_is_killed_with_its_children() -> None:
    with block_signals():
        process = subprocess.Popen([sys.executable, "-c", FAMILY])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    until_s = time.monotonic() + 20
    while not (child := find_child(process.pid)):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process.send_signal(number)
    time.sleep(0.1)
    assert process.poll() is None
    kill_with_children(process)
    assert process.wait(5) == -signal.SIGKILL
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < until_s
        time.sleep(0.02)


def find_child(parent: int) -> int:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    return int((found.stdout.split() or ["0"])[0])
