"""The store in which members of a process group meet, and their listening address: one, never all.

By default torch's TCPStore listens on every interface, without a token: anyone who can write its keys can redirect
ranks.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def store_at(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """The store of a group. Rank 0 listens only at `address`; all wait for each other.

    Raises ConnectionError for an address that it can't listen at, and torch's error for members that don't come.
    """
    listener = _listener(address, port).detach() if rank == 0 else None  # the store closes it
    return dist.TCPStore(
        address, port, world_size, rank == 0, timeout, wait_for_workers=True, master_listen_fd=listener
    )


@contextmanager
def gloo_listening_towards(address: str, port: int) -> Iterator[None]:
    """Context for making a group: gloo's sockets listen on the interface that leads to `address`.

    By default gloo listens at the address of the host's name. A user's GLOO_SOCKET_IFNAME takes precedence.
    """
    interface = find_interface(address_towards(address, port))
    if GLOO_INTERFACE in os.environ or interface is None:
        yield
        return
    os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]


def address_towards(address: str, port: int) -> str:
    """This machine's address on the interface that leads there; no packet is sent."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def find_interface(own_address: str) -> str | None:
    """The name of the interface with this address; None if unknown (IPv6, not Linux)."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == own_address:
                return name
    return None


def _listener(address: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConnectionError(f"can't listen at {address}:{port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConnectionError(f"can't listen at {address}:{port}: {error}") from None
    return listener
