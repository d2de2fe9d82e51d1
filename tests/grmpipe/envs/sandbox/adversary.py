"""An environment whose steps do harm, by name: what a policy's program may do in a worker. Imported in workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.models.types import Message

DAEMON = "86399.75"  # seconds that a daemon sleeps: its name among the machine's processes


def fork_bomb(_: str) -> str:
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)


def hog(_: str) -> str:
    return str(len(bytes(2**30)))  # calloc: untouched pages take no time


HOLD = "bytearray(b'x') * (100 * 2**20)"  # writes every page of 100 MB


def hold_in_forks(count: str) -> str:
    """Processes of 100 MB each, which are forks of the environment."""
    ready, says = os.pipe()
    for _ in range(int(count)):
        if os.fork() == 0:
            held = eval(HOLD)
            os.write(says, b"1")
            time.sleep(3600)
            print(held)
    return held_by(int(count), ready)


def hold_in_programs(count: str) -> str:
    """Processes of 100 MB each, which are programs."""
    ready, says = os.pipe()
    code = f"import os, time; held = {HOLD}; os.write({says}, b'1'); time.sleep(3600)"
    for _ in range(int(count)):
        subprocess.Popen([python(), "-c", code], pass_fds=[says])
    return held_by(int(count), ready)


def share_in_programs(count: str) -> str:
    """A program of 100 MB, and forks of it that only read them."""
    ready, says = os.pipe()
    fork = f"[os.fork() or (os.write({says}, b'1'), time.sleep(3600)) for _ in range({count})]"
    subprocess.Popen([python(), "-c", f"import os, time; held = {HOLD}; {fork}; time.sleep(3600)"], pass_fds=[says])
    return held_by(int(count), ready)


def held_by(count: int, ready: int) -> str:
    """Waits until so many processes hold their memory, and a while."""
    for _ in range(count):
        os.read(ready, 1)
    time.sleep(0.6)
    return "held"


def endless(_: str) -> str:
    while True:
        pass


def connect(_: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.sendto(b"x", ("192.0.2.1", 9))
    return "sent"


def serve_locally(_: str) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        return "connected"


def write(path: str) -> str:
    Path(path).write_text("x", encoding="ascii")
    return "written"


def age(path: str) -> str:
    """Change the times of a file, which Landlock doesn't forbid."""
    os.utime(path)
    return "aged"


def read(path: str) -> str:
    return Path(path).read_text(encoding="ascii")


def fill(_: str) -> str:
    for number in range(100):
        Path(f"file-{number}").write_bytes(bytes(2**20))
    return "filled"


def output(_: str) -> str:
    for _ in range(100):
        sys.stdout.write("x" * 10**6)
    os._exit(7)


def speak(_: str) -> str:
    return "y" * 10**8


def garbage(_: str) -> str:
    for number in range(3, 64):
        try:
            os.write(number, b"\xff\xff\xff\x7f" * 4)
        except OSError:
            continue
    return "written"


def be_deaf(_: str) -> str:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(3600)
    return ""


def daemon(_: str) -> str:
    """A grandchild in a session of its own, whose parent ends."""
    start = f"setsid sleep {DAEMON} </dev/null >/dev/null 2>&1 &"
    subprocess.run(["sh", "-c", start], check=True)
    return "started"


def children(count: str) -> str:
    for _ in range(int(count)):
        if os.fork() == 0:
            time.sleep(3600)
    return "started"


def environ(_: str) -> str:
    return repr(dict(os.environ))


def kill_all(_: str) -> str:
    os.kill(-1, signal.SIGKILL)
    return "killed"


# The beginning of a program that attacks `env`, the environment's process.
PRELUDE = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
env = os.getppid()
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""


def program(code: str) -> str:
    """A Python program, as a policy starts one. It prints what it could do."""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"refused: {done.stderr.strip()[-300:]}"


def python() -> str:
    return sys.executable if os.access(sys.executable, os.X_OK) else "/usr/bin/python3"


def use_up_inodes(_: str) -> str:
    for number in range(20_000):
        Path(f"file-{number}").touch()
    return "touched"


def threads(_: str) -> str:
    for _ in range(64):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return "started"


def signal_parent(name: str) -> str:
    """A program of the policy that wants the environment's process to end."""
    subprocess.run(["sh", "-c", f"kill -{name} $PPID"], check=True)
    time.sleep(0.1)
    return "sent"


def leave(_: str) -> str:
    sys.exit(3)


def take_too_many_turns(_: str) -> str:
    raise MaxTurnsExceeded("Max turns (10) exceeded")


def move_too_often(_: str) -> str:
    raise TooManyMoves


def ping(text: str) -> str:
    return text


class MaxTurnsExceeded(Exception):
    """As openai-agents raises it."""


class TooManyMoves(Exception):
    """A user's own."""


MaxTurnsExceeded.__module__ = "agents.exceptions"


STEPS: dict[str, Callable[[str], str]] = {
    step.__name__: step
    for step in (
        fork_bomb, hog, endless, connect, serve_locally, write, age, read, fill, output, speak, garbage, be_deaf,
        daemon, children, environ, kill_all, program, use_up_inodes, threads, signal_parent, leave,
        take_too_many_turns, move_too_often, ping, hold_in_forks, hold_in_programs, share_in_programs,
    )
}  # fmt: skip


class Adversary:
    """A step `name argument` calls a function above. The kernel's refusal is text, which the policy reads."""

    def __init__(self, boot: str = "") -> None:
        self._boot = boot

    async def open(self, episode: Episode) -> Opening:
        if self._boot:
            name, _, argument = self._boot.partition(" ")
            STEPS[name](argument)
        return Opening(messages=[Message(role="user", content=str(Path.cwd()))], state_key=str(episode.attempt))

    async def step(self, action: Action) -> Observation:
        name, _, argument = action.text.partition(" ")
        if name == "policy_fault":
            raise PolicyFault("no such shop", "arguments")
        if name == "env_fault":
            raise EnvFault("the shop is shut", "unreachable")
        if name == "bug":
            raise KeyError("a bug of the environment")
        try:
            text = STEPS[name.removeprefix("careless_")](argument)
        except OSError as error:
            if name.startswith("careless_"):
                raise
            text = f"refused: {error}"
        reward = np.float32(0.5)
        return Observation(messages=[Message(role="tool", content=text)], done=action.is_last, rewards={"r": reward})  # type: ignore[dict-item]

    async def close(self) -> None:
        """It holds nothing."""
