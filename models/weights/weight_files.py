"""Temporary files of weights: named by their process, deleted when it ends, swept up after a crash."""

import fcntl
import itertools
import os
import re
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
_numbers = itertools.count()


class WeightFile:
    """A unique name in a folder, for as long as this process holds it."""

    def __init__(self, folder: Path, suffix: str = "") -> None:
        self.path = folder / f"grmpipe-weights-{_host()}-{os.getpid()}-{next(_numbers)}{suffix}"
        # Also proof of life if process ids don't help (containers that share a folder): the lock ends with the process.
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._end = weakref.finalize(self, _remove, self.path, self.descriptor, os.getpid())  # also at exit

    def close(self) -> None:
        self._end()


class SharedArena:
    """Memory that other processes of this machine can map by its path; grows to the largest bucket."""

    def __init__(self) -> None:
        self._file: WeightFile | None = None
        self._memory_B = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> str:
        assert self._file is not None, "reserve space first"
        return str(self._file.path)

    def reserve(self, num_bytes: int) -> Tensor:
        """Memory of at least `num_bytes`, uint8. Raises ValueError if no folder has the space."""
        if self._file is None or num_bytes > self._memory_B.numel():
            self.close()
            self._file, mapping = _mapped(max(num_bytes, 1))  # an empty file can't be mapped
            self._memory_B = torch.frombuffer(mapping, dtype=torch.uint8)
        return self._memory_B

    def close(self) -> None:
        self._memory_B = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.close()
            self._file = None


def sweep(folder: Path) -> None:
    """Remove the files that crashed processes left in a folder of this machine: those without a locked owner. A process
    id isn't enough, because another process may have it by now.
    """
    ours = re.compile(rf"grmpipe-(weights|sglang)-{re.escape(_host())}-\d+-")
    for path in folder.glob("grmpipe-*"):
        if not ours.match(path.name) or _locked(path):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def hold_folder(place: Path, kind: str) -> Iterator[Path]:
    """Context: a unique folder in `place`; its lock is proof of life, as for a WeightFile."""
    folder = Path(tempfile.mkdtemp(prefix=f"grmpipe-{kind}-{_host()}-{os.getpid()}-", dir=place))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def folders_of_shared_memory() -> Sequence[Path]:
    """Folders for it, the better one first."""
    return [folder for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())) if os.access(folder, os.W_OK)]


def _mapped(num_bytes: int) -> tuple[WeightFile, mmap]:
    free = {}
    for folder in folders_of_shared_memory():
        free[folder] = shutil.disk_usage(folder).free
        if free[folder] < num_bytes:
            continue
        file = WeightFile(folder)
        try:
            # Now, not at the first write, which would end the process (SIGBUS) if the space is used up meanwhile.
            os.posix_fallocate(file.descriptor, 0, num_bytes)
            return file, mmap(file.descriptor, num_bytes)
        except OSError:
            file.close()
    found = ", ".join(f"{folder} has {room >> 20} MB free" for folder, room in free.items())
    raise ValueError(
        f"sync.transport: shared_memory needs {num_bytes >> 20} MB more but {found or 'no folder is writable'}; "
        "enlarge /dev/shm (docker run --shm-size), or set sync.transport=disk or object_store"
    )


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # a fork has a copy of this object, but doesn't own the file
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _host() -> str:
    return socket.gethostname()
