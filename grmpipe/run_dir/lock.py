"""The lock on a run's directory: one process at a time writes there. Knows nothing of its content."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grmpipe.config.run_config import ConfigError

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no locks


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock until the end of the block, or of the process in any way. Raises ConfigError that names the
    holder.
    """
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        take(descriptor, run_dir)
        yield
    finally:
        os.close(descriptor)


def take(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").strip() or "another process"
        raise ConfigError(
            f"run_dir: {run_dir} is in use by {holder}; wait until it ends, stop it, or type another run_dir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s is on a file system without locks: make sure that no other process writes there", run_dir)
        return
    with contextlib.suppress(OSError):  # on a full disk the lock has no holder's name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{this_process()}\n".encode(), 0)


def this_process() -> str:
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"
