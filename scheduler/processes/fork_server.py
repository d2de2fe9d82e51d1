"""A process that imports large libraries once, from which Ray's workers on this machine are forked.

    python -m grmpipe.scheduler.processes.fork_server LISTENER CONTROL [module ...]    # two open files

    driver -> fork_workers: this process, which imports, beside the driver's own work
    Ray    -> fork_client for each worker: arguments, environment and files -> this process forks

It has one thread, and no CUDA: both don't outlive a fork. It ends, with all that it forked, when the driver does.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

from grmpipe.scheduler.processes import fork_client
from grmpipe.scheduler.processes.process_signals import SENT_TO_ALL

END_S = 5.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # what Ray sets for a worker with at most one core; here libraries read it first
# Arenas of glibc's malloc: with one for each thread, free memory between living tensors grows with a learner's steps.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
_command: ContextVar[str | None] = ContextVar("command", default=None)


@contextmanager
def fork_workers(modules: Sequence[str]) -> Iterator[None]:
    """Context in which a Ray that starts forks its workers from a process that has these modules.

    Only for workers with at most one core each. Elsewhere than on Linux, or with another number of threads in the
    environment, workers start as usual.
    """
    if sys.platform != "linux" or os.environ.get("OMP_NUM_THREADS", "1") != "1" or _ray_runs():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="grmpipe-fork-") as folder:
        path = Path(folder) / "line"
        if (listener := _listen(path)) is None:
            yield
            return
        ours, theirs = socket.socketpair()
        with listener, theirs:
            server = _start(modules, [listener.fileno(), theirs.fileno()])
        reset = _command.set(shlex.join([sys.executable, "-I", "-S", fork_client.__file__, str(path)]))
        try:
            yield
        finally:
            _command.reset(reset)
            ours.close()
            _end(server)


def _start(modules: Sequence[str], files: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *map(str, files), *modules],
        env=ONE_ARENA | os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        pass_fds=files,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a library that can't be imported is reported by the worker that needs it
        start_new_session=True,  # a Ctrl-C is the driver's
    )


def _end(server: subprocess.Popen[bytes]) -> None:
    """Wait for a server whose control socket is closed. One that imports ends at once."""
    server.terminate()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def worker_command() -> str | None:
    """What Ray runs to start a worker; None: its own."""
    return _command.get()


def _ray_runs() -> bool:
    """Whether this process has started or joined a Ray, without the time that importing it takes."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _listen(path: Path) -> socket.socket | None:
    """None where the temporary folder's path is too long for a socket."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        return None
    listener.listen(socket.SOMAXCONN)
    return listener


# -- the process -------------------------------------------------------------------------------------------------------


class ForkServer:
    """Forks what clients ask for, until the control socket closes."""

    def __init__(self, listener: socket.socket, control: socket.socket) -> None:
        self._listener = listener
        self._control = control
        self._workers: dict[int, int] = {}  # file of a process -> its id
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(control, select.POLLIN)

    def stay(self) -> None:
        while True:
            for file, _ in self._poll.poll():
                if file == self._control.fileno():
                    return self._end_all()
                if file == self._listener.fileno():
                    self._answer()
                else:
                    self._reap(file)

    def _answer(self) -> None:
        client, _ = self._listener.accept()
        with contextlib.closing(client):
            try:
                _, files, _, _ = socket.recv_fds(client, 1, 3)
                asked = json.loads(b"".join(iter(lambda: client.recv(2**16), b"")))
                process_id = os.fork()
            except (OSError, ValueError):  # the client is gone, or helps itself where the machine has no room
                return
            if process_id == 0:
                client.detach()
                become_worker(files, **asked)
            for file in files:
                os.close(file)
            process = os.pidfd_open(process_id)
            self._workers[process] = process_id
            self._poll.register(process, select.POLLIN)
            with contextlib.suppress(OSError):
                client.send(b"\n")

    def _reap(self, file: int) -> None:
        self._poll.unregister(file)
        os.close(file)
        os.waitpid(self._workers.pop(file), 0)

    def _end_all(self) -> None:
        for file, process_id in self._workers.items():
            with contextlib.suppress(ProcessLookupError):  # it leads no group yet
                os.killpg(process_id, signal.SIGKILL)
            signal.pidfd_send_signal(file, signal.SIGKILL)
        path = Path(self._listener.getsockname())
        with contextlib.suppress(OSError):  # a driver that was not killed removes it too
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def become_worker(files: Sequence[int], arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Run the program in this process, which was just forked, to its end."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in SENT_TO_ALL:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setpgid(0, 0)  # Ray ends a worker's whole group
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit()


def main(listener: str, control: str, *modules: str) -> None:
    for module in modules:
        importlib.import_module(module)
    os.close(os.pidfd_open(os.getpid()))  # a kernel without it forks nothing
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page that it looks at
    for number in SENT_TO_ALL:  # from now on the control socket's end is what ends it
        signal.signal(number, signal.SIG_IGN)
    ForkServer(socket.socket(fileno=int(listener)), socket.socket(fileno=int(control))).stay()


if __name__ == "__main__":
    main(*sys.argv[1:])
