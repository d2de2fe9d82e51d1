"""An append-only file of JSON lines. Knows bytes and torn lines, never what a line means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


class Journal:
    """A line counts once its newline stands. Each append is one write to the operating system (no fsync).

    Opened at the first append, so that a disk that refuses is the guard's business, not the constructor's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def append(self, record: Mapping[str, object]) -> None:
        """Raises OSError when the line can't be written whole; the file then ends where it ended before."""
        if self._file is None:
            self._file = open_for_append(self.path)
        line = encode_line(record)
        end = self._file.tell()
        try:
            if self._file.write(line) != len(line):
                raise OSError(f"{self.path}: only part of a line could be written; is the disk full?")
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def encode_line(record: Mapping[str, object]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    # Byte-level models do sample lone surrogates; backslashreplace writes them as JSON's own \udXXX.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def open_for_append(path: Path) -> BinaryIO:
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


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal. A torn last line is ignored, a missing file is an empty journal.

    Raises ValueError, naming file and line, where a whole line is no JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield decode_line(line, f"{path}:{number}")


def decode_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not a line of JSON ({error}); remove that line to read the rest") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: not a JSON object; remove that line to read the rest")
    return record


def replace_journal(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Rewrite a journal whole: a reader, or a kill, finds the old file or the new one."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.writelines(encode_line(record) for record in records)
    draft.replace(path)
