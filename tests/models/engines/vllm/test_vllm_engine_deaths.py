"""vLLM's core, or its owner, is killed: no call waits forever, no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ENGINE = """
import asyncio, os, signal, sys, time
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.settings import VllmConfig
from grmpipe.models.types import EngineDied, RequestContext, SamplingParams

def ask(engine, name, num_tokens):
    context = RequestContext(request_id=name, group_id="g", role="policy")
    return engine.generate((1, 2, 3), SamplingParams(max_new_tokens=num_tokens, seed=len(name)), context)
"""
KILLS_ITS_CORE = """
async def use(engine):
    await ask(engine, "first", 1)
    running = asyncio.create_task(ask(engine, "running", 120))
    await asyncio.sleep(0)
    await engine.pause()
    waiting = asyncio.create_task(ask(engine, "waiting", 5))
    await asyncio.sleep(0.05)
    os.kill(engine.process_ids()[0], signal.SIGKILL)
    started_s = time.monotonic()
    calls = [running, waiting, engine.resume(), engine.begin_weights(), engine.pause(), engine.commit_weights(1)]
    calls += [engine.score((1, 2)), ask(engine, "late", 5)]
    for call in calls:
        try:
            await asyncio.wait_for(call, 20)
        except EngineDied as died:
            print(died, flush=True)
    print(time.monotonic() - started_s, flush=True)

if __name__ == "__main__":
    engine = VllmEngine(EngineSpec(path=sys.argv[1], role="policy"), VllmConfig(kv_cache_mb=16))
    asyncio.run(use(engine))
"""
SLEEPS_AND_WAITS = """
def has_sockets():
    return any(name.startswith("grmpipe-") for name in os.listdir(os.environ["TMPDIR"]))

async def use(engine):
    had_sockets = has_sockets()
    await ask(engine, "before", 2)
    had_sockets = had_sockets, has_sockets()
    await engine.pause()
    freed = await engine.sleep()
    asleep = asyncio.create_task(ask(engine, "asleep", 2))
    await engine.wake()
    await asyncio.sleep(0.2)
    kept_waiting = not asleep.done()
    await engine.resume()
    await asleep
    print(engine.process_ids()[0], freed, kept_waiting, *had_sockets, flush=True)

if __name__ == "__main__":
    engine = VllmEngine(EngineSpec(path=sys.argv[1], role="policy", takes_weights=False), VllmConfig(kv_cache_mb=16))
    asyncio.run(use(engine))
    time.sleep(600)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The folder of an owner's temporary files, with a path that is short enough for a socket's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def owner_of_an_engine(folder: Path, model_path: str, does: str) -> subprocess.Popen[str]:
    script = folder / "owner.py"
    script.write_text(ENGINE + does)
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen([sys.executable, script, model_path], stdout=subprocess.PIPE, text=True, env=environment)


def files_left(folder: Path) -> list[str]:
    """But for torch's cache and torch's store, which a process that is killed can't remove."""
    theirs = ("owner.py", "torchinductor", "vllm_dist_")
    return [path.name for path in folder.iterdir() if not path.name.startswith(theirs)]


def test_killed_core_fails_present_and_later_requests_and_its_owner_can_end(model_path: str, temporary: Path) -> None:
    owner = owner_of_an_engine(temporary, model_path, KILLS_ITS_CORE)
    out, _ = owner.communicate(timeout=240)
    assert owner.returncode == 0
    *told, seconds = [line for line in out.splitlines() if "ERROR" not in line]
    assert len(told) == 8
    assert all("policy died" in line and "was killed by signal 9" in line for line in told)
    assert float(seconds) < 10
    assert files_left(temporary) == []


def test_a_core_ends_with_its_owner_and_sleeping_on_a_cpu_frees_nothing_and_says_so(
    model_path: str, temporary: Path
) -> None:
    owner = owner_of_an_engine(temporary, model_path, SLEEPS_AND_WAITS)
    assert owner.stdout is not None
    core, freed, kept_waiting, *had_sockets = owner.stdout.readline().split()
    owner.kill()
    assert owner.wait(timeout=30) == -signal.SIGKILL
    assert (freed, kept_waiting) == ("0", "True")
    assert had_sockets == ["True", "False"], "the core may connect one of them after it has said that it is ready"
    deadline_s = time.monotonic() + 60
    while alive(int(core)):
        assert time.monotonic() < deadline_s, f"process {core} outlived its owner"
        time.sleep(0.1)
    assert files_left(temporary) == []


def alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
