"""A process ends with its exit code, also beside a thread that never does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ENDS = """
import sys, threading, time
from grmpipe.run import process_end
process_end.WAIT_S = 0.2
threading.Thread(target=time.sleep, args=({seconds},), name="of-a-user").start()
process_end.leave(3)
"""


@pytest.mark.parametrize(
    ("seconds", "said"), [(60, "left without waiting for threads that never ended: of-a-user"), (0, "")]
)
def test_a_process_leaves_a_thread_behind_only_if_it_never_ends(seconds: int, said: str) -> None:
    command = [sys.executable, "-c", ENDS.format(seconds=seconds)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[3], timeout=50, capture_output=True, text=True)
    assert ended.returncode == 3
    assert said in ended.stderr and bool(said) == bool(ended.stderr)
