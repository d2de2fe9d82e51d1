"""An append-only file of JSON lines. Knows bytes, torn and damaged lines, and their run; never the meaning of a line.

    {"group_id":"g000001", ..., "run":"9f86d081884c7d65","xxh3":"ef46db3751d8e999"}

`run` is the run that wrote the line, `xxh3` the checksum of all bytes before it. Lines without them are read as well.
"""

import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from grmpipe.models.checksum import checksum
from grmpipe.observe.plain_json import json_bytes

log = logging.getLogger(__name__)


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


T = TypeVar("T")
RUN, CHECKSUM = "run", "xxh3"
BEGIN, END = b'"xxh3":"', b'"}\n'
THINNING = "thinning"  # in the first line of a journal that was thinned
TAIL_BYTES = len(BEGIN) + 16 + len(END)  # at the end of a line: its checksum
BLOCK_BYTES = 1 << 20
WAY_OUT = "remove that line to read the rest"
# What reading a damaged line, or one of another kind, raises.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place between two lines of a journal. after: the end of the line before it, to notice a file that was changed
    since.
    """

    offset: int = 0  # bytes
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinning:
    """What was thinned of a journal, as its first line says: whole lines, which became shorter.

    until:   [bytes] the end of these lines, counted as they were written.
    removed: [bytes] by how much they became shorter, so by how much all lines after them moved.
    """

    until: int = 0
    removed: int = 0

    def to_record(self) -> dict[str, object]:
        """The field of the first line, whose length depends on no number here."""
        return {THINNING: {name: f"{value:020}" for name, value in asdict(self).items()}}


class Journal:
    """A JSON Lines file. A line counts once its newline is written; a line that can't be written whole isn't written at
    all.
    """

    def __init__(self, path: Path, *, run_id: str = "", checked: bool = True) -> None:
        """run_id: of the run that writes; empty: lines name no run. checked: whether lines end with their checksum."""
        self.path = path
        self._run_id = run_id
        self._checked = checked
        self._file = AppendFile(path)
        self._thinning: Thinning | None = None  # read when it is needed

    def append(self, record: Mapping[str, object]) -> None:
        """Append a line; the operating system has it when the call returns. Raises OSError."""
        self._file.append(encode_line(record, self._run_id, checked=self._checked))

    def extend(self, records: Iterable[Mapping[str, object]]) -> None:
        """Append lines by one write: if one can't be written whole, none is. Raises OSError."""
        self._file.append(b"".join(encode_line(record, self._run_id, checked=self._checked) for record in records))

    def mark(self) -> Mark:
        """The mark after the last line, which holds after a thinning too: see `locate`. Raises OSError."""
        if self._thinning is None:
            self._thinning = read_thinning(self.path)
        offset, tail = self._file.tail(TAIL_BYTES)
        return Mark(offset=offset + self._thinning.removed, after=ascii_text(tail))

    def adopt(self, draft: Path, copied: int) -> None:
        """Put a thinned draft in the place of the file: see AppendFile. Raises OSError."""
        self._file.adopt(draft, copied)
        self._thinning = None

    def close(self) -> None:
        self._file.close()


def encode_line(record: Mapping[str, object], run_id: str = "", *, checked: bool = True) -> bytes:
    fields = {**record, RUN: run_id} if run_id else dict(record)
    fields.pop(CHECKSUM, None)  # of a line that is copied from a journal
    encoded = json_bytes(fields)
    if not checked:
        return encoded + b"\n"
    body = encoded[:-1] + (b"," if fields else b"")
    return body + BEGIN + checksum(body).encode() + END


# -- reading ---------------------------------------------------------------------------------------------------------


def read_journal(path: Path, *, run_id: str = "", since: Mark | None = None) -> Iterator[dict[str, Any]]:
    """The records of a journal. A torn last line is ignored, a missing file is an empty journal.

    run_id: lines of other runs are left out. since: begin there; a file that was changed before that mark is read
    whole. Raises ValueError, naming file and line, if a whole line is damaged or no JSON object.
    """
    return read_records(path, lambda record: record, run_id=run_id, since=since)


def read_records(
    path: Path,
    decode: Callable[[dict[str, Any]], T],
    *,
    run_id: str = "",
    since: Mark | None = None,
    until: Mark | None = None,
) -> Iterator[T]:
    """Like `read_journal`, decoded. ValueError also names file and line of a record that `decode` can't read.

    until: end there; a mark that holds.
    """
    num_foreign, checked = 0, False
    for begin, line in read_lines(path, since):
        if until is not None and begin >= until.offset:
            break
        try:
            record, run, has_checksum = parsed(line)
            if checked and not has_checksum:
                raise ValueError(f"it is damaged: it ends without a checksum, unlike lines before it ({CHECKSUM})")
            checked = has_checksum
            if run_id and run not in ("", run_id):
                num_foreign += 1
                continue
            decoded = decode(record)
        except UNREADABLE as error:
            raise ValueError(f"{describe_place(path, begin)}: {describe_error(error)}; {WAY_OUT}") from error
        yield decoded
    if num_foreign:
        log.warning("%s: %d lines of other runs are left out", path, num_foreign)


def read_what_can_be(path: Path) -> Iterator[dict[str, Any]]:
    """The readable records, for a reader that can do without the others, which are logged by file and line."""
    return decode_what_can_be(path, lambda record: record)


def decode_what_can_be(path: Path, decode: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Like `read_what_can_be`, decoded. A record that `decode` can't read is left out, too."""
    for begin, line in read_lines(path):
        try:
            decoded = decode(parsed(line)[0])
        except UNREADABLE as error:
            log.warning("%s: %s; it is left out", describe_place(path, begin), describe_error(error))
            continue
        yield decoded


def describe_error(error: Exception) -> str:
    """What is wrong with a line."""
    if isinstance(error, ValueError) and not isinstance(error, msgspec.ValidationError):
        return str(error)
    return f"not a line of this journal ({error!r})"


def decode_line(line: bytes, place: str) -> dict[str, Any]:
    """One line, checked. ValueError begins with `place`."""
    try:
        return parsed(line)[0]
    except ValueError as error:
        raise ValueError(f"{place}: {error}; {WAY_OUT}") from error


def parsed(line: bytes) -> tuple[dict[str, Any], str, bool]:
    """The content of a whole line, the run that wrote it, and whether it had a checksum. ValueError says what is
    wrong.
    """
    body, tail = line[:-TAIL_BYTES], line[-TAIL_BYTES:]
    has_checksum = tail.startswith(BEGIN) and tail.endswith(END)
    if has_checksum and ascii_text(tail[len(BEGIN) : -len(END)]) != checksum(body):
        raise ValueError(
            f"it is damaged: its checksum doesn't match (if it was changed on purpose, remove its {CHECKSUM})"
        )
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    record.pop(CHECKSUM, None)
    return record, str(record.pop(RUN, "")), has_checksum


def read_lines(path: Path, since: Mark | None = None) -> Iterator[tuple[int, bytes]]:
    """Whole lines and their offsets."""
    if not path.exists():
        return
    with path.open("rb") as file:
        begin = since.offset if since is not None and holds(file.fileno(), since) else 0
        file.seek(begin)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield begin, line
            begin += len(line)


def read_thinning(path: Path) -> Thinning:
    """What was thinned of a journal."""
    if not path.exists():
        return Thinning()
    with path.open("rb") as file:
        first = file.readline(64 * BLOCK_BYTES)  # a device may have no end of a line
    if f'"{THINNING}":{{'.encode() not in first:
        return Thinning()
    try:
        return Thinning(**{name: int(value) for name, value in parsed(first)[0].get(THINNING, {}).items()})
    except UNREADABLE:  # a damaged line, which readers report
        return Thinning()


def locate(path: Path, mark: Mark) -> Mark:
    """The mark of `Journal.mark` as a place in the file as it is now."""
    thinning = read_thinning(path)
    return mark if mark.offset < thinning.until else replace(mark, offset=mark.offset - thinning.removed)


def mark_holds(path: Path, mark: Mark) -> bool:
    """Whether the line before the mark is still there."""
    if not path.exists():
        return mark == Mark()
    with path.open("rb") as file:
        return holds(file.fileno(), mark)


def holds(descriptor: int, mark: Mark) -> bool:
    start = max(0, mark.offset - TAIL_BYTES)
    return ascii_text(os.pread(descriptor, mark.offset - start, start)) == mark.after


def ascii_text(tail: bytes) -> str:
    return tail.decode("ascii", "replace")


def describe_place(path: Path, offset: int) -> str:
    """The place of a line in words, by its number, which is counted only for errors."""
    number = 1
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(offset, BLOCK_BYTES))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{path}:{number}"


def replace_journal(
    path: Path, records: Iterable[Mapping[str, object]], *, run_id: str = "", checked: bool = True
) -> None:
    """Rewrite a journal atomically: a reader, or a kill, finds the old file or the new one."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.writelines(encode_line(record, run_id, checked=checked) for record in records)
    draft.replace(path)
