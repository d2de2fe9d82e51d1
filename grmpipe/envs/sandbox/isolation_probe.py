"""An environment that tries what a worker must not do, and says what it could."""

import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.models.types import Message

MANY_BYTES = 2**30
DOCUMENTATION_ADDRESS = ("192.0.2.1", 9)  # RFC 5737: no machine has it


class IsolationProbe:
    """`open` tries everything, and returns a message per thing that it could do.

    outside: a folder that the worker may neither read nor write. processes: number of them that is one too many.
    """

    def __init__(self, outside: str, processes: int) -> None:
        self._outside = Path(outside)
        self._processes = processes

    async def open(self, episode: Episode) -> Opening:
        tries: dict[str, Callable[[], object]] = {
            "it reads files outside of its list": lambda: list(self._outside.iterdir()),
            "it writes outside of its folder": lambda: (self._outside / "written").write_bytes(b""),
            "it has the network": send_a_packet,
            f"it starts {self._processes} processes": lambda: start_processes(self._processes),
            "it reaches other processes by Unix sockets": lambda: socket.socket(socket.AF_UNIX).close(),
            "it takes 1 GB of memory": lambda: bytes(MANY_BYTES),
            "it takes memory that no limit counts": lambda: os.close(os.memfd_create("")),
            "it shares memory that no limit counts": lambda: mmap.mmap(-1, mmap.PAGESIZE).close(),
        }
        return Opening(messages=[Message(role="user", content=text) for text, act in tries.items() if could(act)])

    async def step(self, action: Action) -> Observation:
        return Observation(done=True)

    async def close(self) -> None:
        """It holds nothing."""


def could(act: Callable[[], object]) -> bool:
    try:
        act()
    except (OSError, MemoryError):
        return False
    return True


def send_a_packet() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.sendto(b"", DOCUMENTATION_ADDRESS)


def start_processes(count: int) -> None:
    """Start processes that only wait, and end them. Raises OSError where there may not be as many."""
    started: list[int] = []
    try:
        for _ in range(count):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            started.append(child)
    finally:
        for child in started:
            os.kill(child, 9)
            os.waitpid(child, 0)
