"""Sizes and checksums of files, to check later that they are unchanged; the folder of what is made once."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

CHUNK_BYTES = 16 << 20
THREADS = 8  # files read at the same time; xxhash releases the GIL


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """name: within its directory, with slashes. xxh3: the hash of its bytes, 64 bits in hex."""

    name: str
    num_bytes: int
    xxh3: str


def find_cache_folder() -> Path:
    """The folder of what the project makes once for all runs: $GRMPIPE_CACHE, or one in the user's home."""
    root = os.environ.get("GRMPIPE_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "grmpipe"


def describe_files(directory: Path, names: Iterable[str]) -> tuple[StoredFile, ...]:
    """Sizes and checksums of the files now."""

    def stored(name: str) -> StoredFile:
        path = directory / name
        return StoredFile(name=name, num_bytes=path.stat().st_size, xxh3=compute_checksum(path))

    with ThreadPoolExecutor(THREADS) as threads:
        return tuple(threads.map(stored, names))


def first_difference(directory: Path, files: Iterable[StoredFile]) -> str | None:
    """The first file that changed, in words; None if none did. Sizes are compared first: they cost nothing."""
    with ThreadPoolExecutor(THREADS) as threads:
        found = [*map(lambda file: _size_differs(directory, file), files := list(files))]
        if any(found):
            return next(filter(None, found))
        return next(filter(None, threads.map(lambda file: _bytes_differ(directory, file), files)), None)


def compute_checksum(path: Path) -> str:
    hashed = xxhash.xxh3_64()
    for chunk in _chunks(path):
        hashed.update(chunk)
    return hashed.hexdigest()


def sync_file(path: Path) -> None:
    """Return once its bytes are on the disk, and survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Like sync_file, for the names in a directory."""
    with suppress(OSError):  # some network file systems have nothing to sync there, and return an error
        sync_file(path)


def _size_differs(directory: Path, file: StoredFile) -> str | None:
    try:
        size = (directory / file.name).stat().st_size
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} can't be read ({error.strerror})"
    return f"{file.name} has {size} bytes instead of {file.num_bytes}" if size != file.num_bytes else None


def _bytes_differ(directory: Path, file: StoredFile) -> str | None:
    try:
        same = compute_checksum(directory / file.name) == file.xxh3
    except OSError as error:
        return f"{file.name} can't be read ({error.strerror})"
    return None if same else f"{file.name} was changed after it was written (xxh3-64)"


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
