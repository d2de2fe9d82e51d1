"""CPU seconds by process id."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from scheduler.processes.cpu_time import cpu_seconds


def test_cpu_time_counts_work_and_no_sleep() -> None:
    before_s, began_s = cpu_seconds([os.getpid()]), time.process_time()
    while time.process_time() - began_s < 0.2:
        pass
    time.sleep(0.2)
    assert cpu_seconds([os.getpid()]) - before_s == pytest.approx(time.process_time() - began_s, abs=0.03)


def test_a_process_that_is_gone_counts_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_seconds([gone.pid]) == 0.0
    assert cpu_seconds([]) == 0.0
