"""The process group of weight broadcasts: one sender, ranks that come and go. Not torch's default group.

A bucket is one broadcast of all its tensors' bytes (see `pack`). A receiver made by torch itself (SGLang's
`init_custom_process_group`: a TCPStore at the link's address under `PrefixStore(name)`, then
`torch.distributed.broadcast(bytes, src=0, group=...)`) can talk to this one. These groups
stay out of torch's registry: sender and receiver may share a process, and leaving one group affects no other.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from grmpipe.models.bucket_memory import BucketMemory
from grmpipe.models.rendezvous import address_towards, store_at
from grmpipe.models.types import GroupLink

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
LOOK_EVERY_S = 1.0  # for a sender that has left, while a bucket doesn't come


class _Backend(Protocol):
    """The methods of torch's gloo and nccl groups that its type stubs lack."""

    def broadcast(self, tensor: Tensor, root: int, timeout: timedelta) -> dist.Work: ...

    def abort(self) -> None: ...


class BroadcastLink:
    """One member's end of a group. Joining under a new name leaves the old group; a failed member leaves, so that the
    others notice. Gloo doesn't tell a receiver in the middle of a bucket, which looks for the sender's store instead.

    Errors are ConnectionErrors, at the latest after the link's timeouts; a new group can be joined after each.
    """

    def __init__(self, device: torch.device | None = None, local_rank: int = 0) -> None:
        """device: where tensors are received (nccl: this process's GPU). local_rank: within an engine of several."""
        self._device = device or torch.device("cpu")
        self._local_rank = local_rank
        self._link: GroupLink | None = None
        self._backend: _Backend | None = None
        self._store: dist.Store | None = None
        self._published: str | None = None
        self._arena = BucketMemory(torch.device("cpu"))
        self._connected = False  # NCCL connects its members in the first broadcast

    @property
    def name(self) -> str | None:
        """The name of the joined group, if any."""
        return self._link.name if self._link is not None else None

    def join(self, link: GroupLink | None) -> None:
        """Join a group; blocks until all members are there. None leaves; a group joined already is kept."""
        if link is not None and link.name == self.name:
            return
        self.leave()
        if link is None:
            return
        try:
            self._backend, self._store = _meet(link, link.rank + self._local_rank, self._device)
        except (RuntimeError, OSError) as error:
            raise ConnectionError(
                f"weights: rank {link.rank + self._local_rank} of {link.world_size} could not join the group "
                f"{link.name!r} at {link.address}:{link.port} within {link.meeting_timeout_s:g} s: {_plain(error)}"
            ) from None
        self._link, self._connected = link, False
        self._arena = BucketMemory(self._device if link.backend == "nccl" else torch.device("cpu"))

    def leave(self) -> None:
        """Close the connections: all who wait on them fail now."""
        backend, link, self._backend, self._link = self._backend, self._link, None, None
        self._store = self._published = None
        self._arena = BucketMemory(torch.device("cpu"))
        if backend is not None and link is not None and link.backend == "nccl":
            backend.abort()  # not shutdown, which waits for hanging operations

    def send(self, names: Sequence[str], packed_B: Tensor) -> None:
        """Send a bucket's bytes to all members, as rank 0. Blocks until they have received."""
        self._broadcast(names, packed_B, "sending")

    def publish(self, version: int, data: str) -> None:
        """Leave data for `read_published` in place of the last version's."""
        if self._store is not None:
            if self._published is not None:
                self._store.delete_key(self._published)
            self._published = f"published/{version}"
            self._store.set(self._published, data)

    def receive(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Receive a bucket that rank 0 sends. The memory is reused in the next call."""
        packed_B, tensors = self._arena.take_packed(dtypes, shapes)
        self._broadcast(names, packed_B, "receiving")
        return tensors

    def _broadcast(self, names: Sequence[str], packed_B: Tensor, what: str) -> None:
        link = self._link
        if self._backend is None or link is None:
            raise ConnectionError(
                "weights: a bucket comes by broadcast, but no process group was joined since the last one failed"
            )
        if not packed_B.numel():
            return
        timeout_s = link.timeout_s if self._connected else link.meeting_timeout_s
        limit_s = timeout_s + link.time_for_bytes_s(packed_B.numel())
        reason = _failure(self._backend, packed_B, limit_s, link)
        if reason is not None:
            if self._link is link:  # a caller that gave up may have joined another group since
                self.leave()
            span = " .. ".join(repr(name) for name in dict.fromkeys((names[0], names[-1])))
            raise ConnectionError(
                f"weights: {what} {span} in the group {link.name!r} of {link.world_size} failed: {reason}"
            )
        self._connected = True


def _failure(backend: _Backend, packed_B: Tensor, timeout_s: float, link: GroupLink) -> str | None:
    """Broadcast, and return why it failed.

    Returned, not raised: a traceback would keep the backend, and so the connections, alive.
    """
    looks = link.backend == "gloo" and link.rank > 0
    ends_s = time.monotonic() + timeout_s
    work = backend.broadcast(packed_B, 0, timedelta(seconds=timeout_s))
    while True:
        left_s = max(0.001, ends_s - time.monotonic())
        try:
            work.wait(timedelta(seconds=min(LOOK_EVERY_S, left_s) if looks else left_s))
            return None
        except RuntimeError as error:
            if not looks or work.is_completed() or time.monotonic() >= ends_s:
                return _plain(error)
        if _has_left(link, ends_s - time.monotonic()):
            # Gloo has no abort: its end of the group stays, with the bucket's memory, until its own timeout.
            threading.Thread(target=_outlast, args=(backend, work, timeout_s), name="left-group", daemon=True).start()
            return "the sender left the group, or ended"


def _has_left(link: GroupLink, limit_s: float) -> bool:
    """Whether nobody listens at the sender's store any more. A machine that is gone doesn't answer: false."""
    try:
        socket.create_connection((link.address, link.port), timeout=max(0.001, limit_s)).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _outlast(backend: _Backend, work: dist.Work, limit_s: float) -> None:
    """Keep a group while it waits: its last reference would wait in the caller's thread."""
    with suppress(RuntimeError):
        work.wait(timedelta(seconds=limit_s))


def read_published(link: GroupLink, version: int) -> bytes:
    """What the sender published for a version. Raises ConnectionError."""
    try:
        timeout = timedelta(seconds=link.timeout_s)
        store = dist.TCPStore(link.address, link.port, None, False, timeout, wait_for_workers=False)
        return bytes(store.get(f"published/{version}"))
    except (RuntimeError, OSError) as error:
        raise ConnectionError(f"weights: the sender published nothing for version {version}: {_plain(error)}") from None


def _meet(link: GroupLink, rank: int, device: torch.device) -> tuple[_Backend, dist.Store]:
    timeout = timedelta(seconds=link.meeting_timeout_s)
    meeting: dist.Store = store_at(link.address, link.port, rank, link.world_size, timeout)
    meeting.set_timeout(timeout)
    store = meeting
    # The prefixes that torch gives its own groups: see `_new_process_group_helper`.
    for prefix in (link.name, f"{link.name}/", "cuda/" if link.backend == "nccl" else "cpu/"):
        store = dist.PrefixStore(prefix, store)
    if link.backend == "nccl":
        return _nccl(store, rank, link.world_size, timeout, device), meeting
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # By default gloo listens at the address of the host's name: the address on the way to the sender is enough.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(link.address, link.port))]
    return cast(_Backend, dist.ProcessGroupGloo(store, rank, link.world_size, options)), meeting


def _nccl(store: dist.Store, rank: int, world_size: int, timeout: timedelta, device: torch.device) -> _Backend:
    """A group whose waits raise: by default NCCL's watchdog ends the whole process after a timeout."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"  # read once, while the group is made
    try:
        with torch.cuda.device(device):
            return cast(_Backend, dist.ProcessGroupNCCL(store, rank, world_size, options))
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def _plain(error: Exception) -> str:
    """The message without torch's source lines before it and its advice after it."""
    said = str(error).partition("This is typically")[0].rpartition("] ")[2].strip()
    return said.partition("\n")[0] or repr(error)
