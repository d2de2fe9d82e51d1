"""A process ends with its exit code, also beside a thread that never does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AT_ITS_END = """
import atexit, os, signal, threading
from grmpipe.run import signals
atexit.register(print, "its last words")
atexit.register({there})
signals.leave(3)
"""
ENDS = """
import sys, threading, time
from grmpipe.run import signals
signals.WAIT_S = 0.2
threading.Thread(target=time.sleep, args=({seconds},), name="of-a-user").start()
signals.leave(3)
"""


@pytest.mark.parametrize(
    ("seconds", "said"), [(60, "left without waiting for threads that never ended: of-a-user"), (0, "")]
)
def test_a_process_leaves_a_thread_behind_only_if_it_never_ends(seconds: int, said: str) -> None:
    command = [sys.executable, "-c", ENDS.format(seconds=seconds)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[3], timeout=50, capture_output=True, text=True)
    assert ended.returncode == 3
    assert said in ended.stderr and bool(said) == bool(ended.stderr)


@pytest.mark.parametrize("there", ["print", "os.kill, os.getpid(), signal.SIGTERM"], ids=["nothing", "a signal"])
def test_a_process_ends_by_its_own_code_after_what_is_registered_for_its_end(there: str) -> None:
    command = [sys.executable, "-c", AT_ITS_END.format(there=there)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[3], timeout=50, capture_output=True, text=True)
    assert ended.returncode == 3
    assert ("its last words" in ended.stdout) == (there == "print")
