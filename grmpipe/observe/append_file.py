"""A file that grows by whole pieces: each piece is written completely or not at all."""

import io
import os
import shutil
from pathlib import Path
from typing import BinaryIO


class AppendFile:
    """A file to append to. Each append is one write to the operating system (no fsync). Pieces end with a newline.

    It is opened at the first append, so that the guard, not the constructor, meets an error of the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def open(self) -> BinaryIO:
        """Open the file now, for callers that must read its present content first."""
        if self._file is None:
            self._file = open_behind_last_line(self.path)
        return self._file

    def append(self, piece: bytes) -> None:
        """Append a piece. Raises OSError if the file was deleted, where nobody would find it, or if it can't be written
        whole; the file then ends where it ended before.
        """
        file = self.open()
        if os.fstat(file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self.path}: was deleted since it was opened")
        written = file.write(piece)
        if written != len(piece):
            file.truncate(file.tell() - (written or 0))
            raise OSError(f"{self.path}: only part of a line could be written; is the disk full?")

    def tail(self, num_bytes: int) -> tuple[int, bytes]:
        """The size of the file, and its last `num_bytes` bytes. Raises OSError."""
        descriptor = self.open().fileno()
        end = os.fstat(descriptor).st_size
        start = max(0, end - num_bytes)
        return end, os.pread(descriptor, end - start, start)

    def adopt(self, draft: Path, copied: int) -> None:
        """Put a draft in the place of the file: it has what the file held up to `copied` [bytes], changed or not, and
        gets what was appended since. A kill leaves the old file or the new one. Raises OSError.
        """
        with self.path.open("rb") as old, draft.open("ab") as new:
            old.seek(copied)
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
        draft.replace(self.path)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def open_behind_last_line(path: Path) -> BinaryIO:
    """Open a file unbuffered, at the end of its last whole line: a line torn by a killed run is cut off first.

    Every write goes to the end of the file (O_APPEND), even if other processes write there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    file = io.FileIO(descriptor, "r+")
    end = end_of_last_line(file)
    file.truncate(end)
    file.seek(end)
    return file


def end_of_last_line(file: BinaryIO, block_bytes: int = 65536) -> int:
    """The offset after the last newline; 0 if there is none."""
    stop = file.seek(0, 2)
    while stop > 0:
        start = max(0, stop - block_bytes)
        file.seek(start)
        newline = file.read(stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0
