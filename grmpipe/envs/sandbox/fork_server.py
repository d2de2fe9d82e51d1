"""A process of its own that imports a run's environment once, and forks a worker from it for each episode.

    python -m grmpipe.envs.sandbox.fork_server FD    # of its socket to the run

Small: it imports no torch and no Ray. It ends when the run ends.
"""

import asyncio
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from grmpipe.config.env import EnvConfig
from grmpipe.envs.checked_env import CheckedEnv
from grmpipe.envs.env import Env
from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.fault_owner import explain_unread, fault_rules
from grmpipe.envs.sandbox import kernel
from grmpipe.envs.sandbox.confinement import Bounds, Missing, measure_address_space
from grmpipe.envs.sandbox.env_worker import serve
from grmpipe.envs.sandbox.messages import Confined, frame
from grmpipe.envs.sandbox.readable_files import ReadableFiles, find_readable_files, list_imported
from grmpipe.envs.sandbox.supervisor import map_users_when_asked, supervise

MAX_CONTROL = 2**17  # bytes of a control message


class ForkServerSetup(msgspec.Struct, frozen=True):
    """The environment to import.

    data:        the run and its data, which no worker reads.
    in_own_root: this process is in bubblewrap, with mounts of its own.
    """

    env: EnvConfig
    data: tuple[str, ...] = ()
    in_own_root: bool = False


class Ready(msgspec.Struct, frozen=True):
    """The environment is imported. error: why not."""

    error: str = ""


class Fork(msgspec.Struct, frozen=True):
    """A worker to fork. Two sockets come with it: for the environment, and for its supervisor."""

    bounds: Bounds


def main(control: socket.socket) -> None:
    kernel.set_parent_death_signal(signal.SIGKILL)
    if not is_connected(control):  # the run has ended before that
        return
    with contextlib.suppress(OSError):  # where memory runs out, a worker goes before the run
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    kernel.hide_from_others()
    setup = msgspec.msgpack.decode(control.recv(MAX_CONTROL), type=ForkServerSetup)
    try:
        if setup.in_own_root and os.geteuid() == 0:
            uncover_proc()
        make = make_checked(setup.env)
        readable = find_readable_files(setup.env, setup.data, list_imported())
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        text += explain_unread(error) if setup.in_own_root else ""
        control.send(msgspec.msgpack.encode(Ready(error=text[-MAX_CONTROL // 2 :])))
        return
    control.send(msgspec.msgpack.encode(Ready()))
    ForkServer(control, make, readable).stay()


def uncover_proc() -> None:
    """Mount /proc whole: bubblewrap covers parts of root's, and then the kernel lets no worker mount its own."""
    with contextlib.suppress(OSError):
        kernel.mount("proc", "/proc", "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)


def make_checked(config: EnvConfig) -> Callable[[], Env]:
    """Constructs environments behind their door, for workers. Raises ValueError."""
    make, rules = env_factory(config), fault_rules(config.policy_errors, in_box=True)
    return lambda: CheckedEnv(make, rules)


class ForkServer:
    """Forks workers at the run's word, and waits for their supervisors."""

    def __init__(self, control: socket.socket, make: Callable[[], Env], readable: ReadableFiles) -> None:
        self._control = control
        self._make = make
        self._mapped_bytes = measure_address_space()
        self._read = tuple(path for part in readable.parts for path in part.carve())
        self._listed = readable.listed
        gc.freeze()  # a collection in a worker would copy every page that it looks at

    def stay(self) -> None:
        """Until the run closes the control socket."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes `poll`
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if woken in ready:
                os.read(woken, 4096)
                reap()
            if self._control.fileno() in ready and not self._fork(woken, wakes):
                return

    def _fork(self, *own: int) -> bool:
        """Fork the worker that is asked for. Returns False at the end of the run."""
        asked, sockets, _, _ = socket.recv_fds(self._control, MAX_CONTROL, 2, socket.MSG_CMSG_CLOEXEC)
        if not asked:
            return False
        bounds = msgspec.msgpack.decode(asked, type=Fork).bounds
        bounds = replace(bounds, read=self._read, listed=self._listed, mapped_bytes=self._mapped_bytes)
        outside, inside = socket.socketpair()
        env_socket, run_socket = (socket.socket(fileno=each) for each in sockets)
        child = None
        with contextlib.suppress(OSError):  # the machine has no room for it: the run sees its sockets close
            child = os.fork()
        if child == 0:
            self._become_supervisor(bounds, env_socket, run_socket, inside, (*own, outside.fileno()))
        for each in (inside, env_socket, run_socket):
            each.close()
        with outside:
            if child is not None:
                map_users_when_asked(outside, child)
        return True

    def _become_supervisor(
        self,
        bounds: Bounds,
        env_socket: socket.socket,
        run_socket: socket.socket,
        host: socket.socket,
        others: tuple[int, ...],
    ) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for each in others:
                os.close(each)

            def live(missing: tuple[Missing, ...]) -> None:
                env_socket.sendall(frame(Confined(missing=missing)))
                # Not asyncio.run: the process ends at once, with no loop to tidy up.
                asyncio.new_event_loop().run_until_complete(live_in(env_socket, self._make))

            supervise(bounds, run_socket, env_socket, host, live)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


async def live_in(env_socket: socket.socket, make: Callable[[], Env]) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=env_socket)
    await serve(make(), reader, writer)


def is_connected(control: socket.socket) -> bool:
    poll = select.poll()
    poll.register(control, 0)
    return not poll.poll(0)


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as run:
        main(run)
