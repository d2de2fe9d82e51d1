"""Ranks and a broadcast group in one process, which then prints its listening addresses. Run by test_rendezvous.py."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from ipaddress import ip_address
from pathlib import Path

import torch
import torch.distributed as dist

from grmpipe.models.lm.parallel.ranks import join_ranks
from grmpipe.models.types import GroupLink
from grmpipe.models.weights.process_group import BroadcastLink

LISTENING = "0A"  # the state in the kernel's tables


def listening() -> set[str]:
    """The addresses of this process's listening TCP sockets."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue  # that of the listing itself
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {address_of(row[1]) for row in rows if len(row) > 9 and row[3] == LISTENING and row[9] in inodes}


def address_of(field: str) -> str:
    """`0100007F:1F90` -> 127.0.0.1: words of 4 bytes, each in the machine's byte order."""
    raw = bytes.fromhex(field.partition(":")[0])
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    return str(ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)))


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def broadcast(address: str) -> set[str]:
    """Two members of one group, on two threads."""
    port = free_port(address)
    groups = [BroadcastLink(), BroadcastLink()]
    links = [
        GroupLink(name="g", backend="gloo", address=address, port=port, rank=rank, world_size=2, timeout_s=20.0)
        for rank in range(2)
    ]
    threads = [threading.Thread(target=group.join, args=(link,)) for group, link in zip(groups, links, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sending = threading.Thread(target=groups[0].send, args=(["w"], torch.ones(3).view(torch.uint8)))
    sending.start()
    (came,) = groups[1].receive(["w"], [torch.float32], [(3,)])
    sending.join()
    assert came.tolist() == [1.0] * 3
    found = listening()
    for group in groups:
        group.leave()
    return found


def main(address: str) -> None:
    found = {"broadcast": broadcast(address)}
    join_ranks(0, 1, f"tcp://{address}:{free_port(address)}", torch.device("cpu"))
    dist.barrier()
    print(json.dumps({name: sorted(addresses) for name, addresses in (found | {"ranks": listening()}).items()}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an orderly exit


if __name__ == "__main__":
    main(sys.argv[1])
