"""The fork server with small modules, asked by its client as Ray does."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe.scheduler.processes.fork_server import fork_workers, worker_command

MODULE = "colorsys"  # which nothing here imports
TELLS = """
import os, sys
print(os.getppid(), 'colorsys' in sys.modules, sys.argv[1:], os.environ['SEEN'], flush=True)
"""
STAYS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
COUNTS_ARENAS = """
import ctypes, os, threading
held = []
threads = [threading.Thread(target=lambda: held.append(bytearray(1 << 16))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.dup2(1, 2)
ctypes.CDLL(None).malloc_stats()
"""
DRIVER = """
import subprocess, sys, shlex
from grmpipe.scheduler.processes.fork_server import fork_workers, worker_command
with fork_workers(["colorsys"]):
    subprocess.run([*shlex.split(worker_command()), sys.argv[1]])
    input()
"""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Start a worker that runs a program, as Ray does. Returns the first line that it prints."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def start(program: str, *arguments: str, command: str | None = None) -> str:
        script = tmp_path / "worker.py"
        script.write_text(program)
        command = command or worker_command()
        assert command is not None
        client = subprocess.Popen(
            [*shlex.split(command), str(script), *arguments],
            env=os.environ | {"SEEN": "here"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None
        with client:
            return client.stdout.readline() if program == STAYS else client.communicate(timeout=30)[0]

    return start


def ends(process_id: int, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_a_worker_has_the_modules_and_all_that_ray_gave_it(ask: Callable[..., str]) -> None:
    with fork_workers([MODULE]):
        told = ask(TELLS, "--a", "b c")
    parent, rest = told.split(" ", 1)
    assert rest == "True ['--a', 'b c'] here\n"
    assert int(parent) != os.getpid()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_the_threads_of_a_worker_share_their_memory(ask: Callable[..., str]) -> None:
    with fork_workers([MODULE]):
        told = ask(COUNTS_ARENAS)
    assert "Arena 0:" in told and "Arena 1:" not in told


def test_without_an_answer_the_client_becomes_the_worker(ask: Callable[..., str]) -> None:
    with fork_workers(["no_such_module"]):
        assert " False " in ask(TELLS), "the library can't be imported"
        command = worker_command()
    assert " False " in ask(TELLS, command=command), "the server has ended"


def test_all_that_was_forked_ends_with_the_context(ask: Callable[..., str]) -> None:
    with fork_workers([MODULE]):
        worker = int(ask(STAYS))
        os.kill(worker, 0)
    assert ends(worker)


def test_a_killed_worker_is_no_zombie_and_others_are_forked_after_it(ask: Callable[..., str]) -> None:
    with fork_workers([MODULE]):
        worker = int(ask(STAYS))
        os.kill(worker, signal.SIGKILL)
        assert ends(worker)
        assert " True " in ask(TELLS)


def test_a_worker_has_a_process_group_of_its_own_which_ray_ends_with_it(ask: Callable[..., str]) -> None:
    with fork_workers([MODULE]):
        worker = int(ask(STAYS))
        assert os.getpgid(worker) == worker


def test_the_workers_of_a_killed_driver_end_and_leave_no_folder(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(STAYS)
    (tmp_path / "t").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "worker.py")],
        env=os.environ | {"TMPDIR": str(tmp_path / "t")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        worker = int(driver.stdout.readline())
        driver.kill()
        assert ends(worker)
    deadline_s = time.monotonic() + 10
    while left := list(tmp_path.glob("t/grmpipe-fork-*")):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.01)


def test_a_run_that_is_refused_does_not_wait_for_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_library.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with fork_workers(["slow_library"]):
        assert worker_command() is not None
    assert time.monotonic() - began < 30
    assert worker_command() is None


def test_in_a_folder_whose_path_is_too_long_for_a_socket_workers_start_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with fork_workers([MODULE]):
        assert worker_command() is None


def test_with_more_threads_workers_start_as_ray_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with fork_workers([MODULE]):
        assert worker_command() is None
