"""The CPU seconds of a step by role."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any, cast

from grmpipe.run.features.cpu_seconds import CpuSeconds

BUSY = """
import time
print("ready", flush=True)
input()
while time.process_time() < 0.5:
    pass
print("done", flush=True)
input()
"""
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"


def test_the_work_of_a_process_that_an_engine_started_is_its_roles() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        ids = {"policy": [engine.pid], "grm": []}
        feature = CpuSeconds(cast(Any, Processes(ids)), ids)
        assert engine.stdout.readline() == b"ready\n"
        feature.next_step()
        engine.stdin.write(b"go\n")
        engine.stdin.flush()
        assert engine.stdout.readline() == b"done\n"
        seen = asyncio.run(feature.after_step(cast(Any, None)))
        engine.stdin.write(b"end\n")
    assert seen.keys() == {"driver/cpu_s", "policy/cpu_s"}
    assert seen["policy/cpu_s"] > 0.3


class Processes:
    """A cluster of which only the process ids are known."""

    def __init__(self, ids: dict[str, list[int]]) -> None:
        self._ids = ids

    def process_ids(self, role: str) -> list[int]:
        return self._ids[role]
