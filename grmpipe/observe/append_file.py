"""A file that grows by whole pieces: all of a piece or none of it. Knows nothing of what stands in it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO


class AppendFile:
    """Each append is one write to the operating system (no fsync). Pieces end with a newline.

    Opened at the first append, so that a disk that refuses is the guard's business, not the constructor's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def open(self) -> BinaryIO:
        """Open it now; to be called where what already stands in the file must be looked at first."""
        if self._file is None:
            self._file = open_behind_last_line(self.path)
        return self._file

    def append(self, piece: bytes) -> None:
        """Raises OSError when the piece can't be written whole; the file then ends where it ended before."""
        file = self.open()
        end = file.tell()
        try:
            if file.write(piece) != len(piece):
                raise OSError(f"{self.path}: only part of a line could be written; is the disk full?")
        except OSError:
            file.truncate(end)
            file.seek(end)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def open_behind_last_line(path: Path) -> BinaryIO:
    """Unbuffered, at the end of the last whole line: what a killed run tore is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    file = path.open("r+b", buffering=0)
    end = end_of_last_line(file)
    file.truncate(end)
    file.seek(end)
    return file


def end_of_last_line(file: BinaryIO, block_bytes: int = 65536) -> int:
    """Offset behind the last newline; 0 if there is none."""
    stop = file.seek(0, 2)
    while stop > 0:
        start = max(0, stop - block_bytes)
        file.seek(start)
        newline = file.read(stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0
