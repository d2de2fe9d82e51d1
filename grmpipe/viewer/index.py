"""The index of a run: an SQLite file in the user's cache, which follows the journals. Never writes into the run.

    index = RunIndex(run_dir)
    for progress in index.follow(): ...     # reads what is new since the last time, in pieces

A torn last line waits until it is whole; a line that can't be read is counted and left out. If a journal was cut or
rewritten since, or the directory holds another run, the index starts over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import msgspec

from grmpipe.config.run_config import ConfigError
from grmpipe.observe.journal import TAIL_BYTES, Mark, ascii_text, mark_holds
from grmpipe.run_dir.identity import run_id_of
from grmpipe.viewer.journal_lines import GroupLine, Line, ReportLine, RolloutLine, TrainedLine

FORMAT = "1"  # of the index; one of another format is made anew
ROLLOUTS, JUDGEMENTS, GROUPS, TRAINED = "rollouts.jsonl", "judgements.jsonl", "groups.jsonl", "trained.jsonl"
EVAL_ROLLOUTS, EVAL_JUDGEMENTS = "eval_rollouts.jsonl", "eval_judgements.jsonl"
# What a line refers to was written before it. So the sizes are taken from the end of this list to its beginning.
JOURNALS = (ROLLOUTS, EVAL_ROLLOUTS, JUDGEMENTS, EVAL_JUDGEMENTS, TRAINED, GROUPS)
WITH_TEXT = (ROLLOUTS, JUDGEMENTS, EVAL_ROLLOUTS, EVAL_JUDGEMENTS)  # a journal's place is its number in the keys
HELD_OUT = (EVAL_ROLLOUTS, EVAL_JUDGEMENTS)
PIECE_BYTES = 8_000_000  # between two commits
KEY = ("held_out", "round", "group_id", "sibling")
L = TypeVar("L", bound=Line)


def cache_dir() -> Path:
    """The folder of all indexes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grmpipe" / "viewer"


def place_of_key(key: int) -> tuple[str, int]:
    """The journal and the offset of a line, by its key."""
    return WITH_TEXT[key % len(WITH_TEXT)], key // len(WITH_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexProgress:
    """done, total: bytes of the journals. unreadable: lines left out."""

    done: int
    total: int
    unreadable: int

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0


class RunIndex:
    """One writer follows the run; any number of readers query meanwhile."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.resolve()
        name = hashlib.sha256(str(self.run_dir).encode()).hexdigest()[:16]
        self.path = cache_dir() / f"{name}.sqlite"

    def read(self) -> sqlite3.Connection:
        """A connection for queries, which changes nothing. Raises sqlite3.Error before the first `follow`."""
        connection = sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True, timeout=30)
        connection.row_factory = sqlite3.Row
        return connection

    def follow(self) -> Iterator[IndexProgress]:
        """Read what is new; the progress after each piece, and at the beginning. Raises OSError, sqlite3.Error."""
        self._remove_if_void()
        with contextlib.closing(self._open()) as connection:
            sizes = {name: size_of(self.run_dir / name) for name in reversed(JOURNALS)}
            yield self._progress(connection, sizes)
            for name in JOURNALS:
                for _ in self._read_journal(connection, name, sizes[name]):
                    yield self._progress(connection, sizes)

    def progress(self) -> IndexProgress:
        """How far the index is. Raises sqlite3.Error before the first `follow`."""
        with contextlib.closing(self.read()) as connection:
            return self._progress(connection, {name: size_of(self.run_dir / name) for name in JOURNALS})

    # -- the file ------------------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_new = not self.path.exists()
        connection = sqlite3.connect(self.path, timeout=30)
        self.path.chmod(0o600)
        connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;")
        if is_new:
            connection.executescript((files("grmpipe.viewer") / "schema.sql").read_text(encoding="utf-8"))
            facts = {"format": FORMAT, "run_dir": str(self.run_dir), "run_id": run_id(self.run_dir)}
            connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
            connection.commit()
        return connection

    def _remove_if_void(self) -> None:
        """Remove an index that isn't that of the present files."""
        if self.path.exists() and not self._is_valid():
            for end in ("", "-wal", "-shm"):
                Path(f"{self.path}{end}").unlink(missing_ok=True)

    def _is_valid(self) -> bool:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self.path)) as connection:
            facts = dict(connection.execute("SELECT name, value FROM facts"))
            journals = connection.execute("SELECT name, offset, after, inode FROM journals").fetchall()
            return (facts.get("format"), facts.get("run_id")) == (FORMAT, run_id(self.run_dir)) and all(
                inode == inode_of(self.run_dir / name) and mark_holds(self.run_dir / name, Mark(offset=at, after=after))
                for name, at, after, inode in journals
            )
        return False

    def _progress(self, connection: sqlite3.Connection, sizes: Mapping[str, int]) -> IndexProgress:
        done, unreadable = connection.execute("SELECT sum(offset), sum(unreadable) FROM journals").fetchone()
        return IndexProgress(done=done or 0, total=sum(sizes.values()), unreadable=unreadable or 0)

    # -- journals ------------------------------------------------------------------------------------------------------

    def _read_journal(self, connection: sqlite3.Connection, name: str, size: int) -> Iterator[None]:
        """Read a journal up to a size, in pieces, each of which is committed with its end. Another viewer of the same
        run may read pieces in between.
        """
        path = self.run_dir / name
        ingest = Ingest(connection, name, run_id(self.run_dir))
        while True:
            connection.execute("BEGIN IMMEDIATE")
            found = connection.execute("SELECT offset, unreadable FROM journals WHERE name = ?", (name,)).fetchone()
            begin, unreadable = found or (0, 0)
            piece = whole_lines(path, begin, size) if begin < size else b""
            if piece:
                unreadable += ingest.lines(begin, piece)
                values = (name, begin + len(piece), ascii_text(piece[-TAIL_BYTES:]), inode_of(path), unreadable)
                connection.execute("INSERT OR REPLACE INTO journals VALUES (?, ?, ?, ?, ?)", values)
            connection.commit()
            if not piece:
                return
            yield


def run_id(run_dir: Path) -> str:
    """The run's id; empty if it has none that can be read."""
    with contextlib.suppress(ConfigError, OSError):
        return run_id_of(run_dir)
    return ""


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def inode_of(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def whole_lines(path: Path, begin: int, size: int) -> bytes:
    """The next whole lines, one at least if there is one."""
    with path.open("rb") as file:
        file.seek(begin)
        piece = file.read(min(PIECE_BYTES, size - begin))
        if not piece.endswith(b"\n"):
            piece += file.readline()
    return piece[: piece.rfind(b"\n") + 1]


class Ingest:
    """Writes the lines of one journal into the index."""

    def __init__(self, connection: sqlite3.Connection, name: str, run: str) -> None:
        self._connection = connection
        self._name = name
        self._run = run
        self._held_out = int(name in HELD_OUT)
        self._number = WITH_TEXT.index(name) if name in WITH_TEXT else 0
        self._decoders = {
            kind: msgspec.json.Decoder(kind) for kind in (RolloutLine, ReportLine, TrainedLine, GroupLine)
        }

    def lines(self, offset: int, piece: bytes) -> int:
        """The number of lines that can't be read."""
        unreadable = 0
        for line in piece.split(b"\n")[:-1]:
            try:
                self._line(offset * len(WITH_TEXT) + self._number, line)
            except (msgspec.MsgspecError, UnicodeError):
                unreadable += 1
            offset += len(line) + 1
        return unreadable

    def _line(self, key: int, line: bytes) -> None:
        if self._name == GROUPS:
            self._group(self._decode(line, GroupLine))
        elif self._name == TRAINED:
            self._trained(self._decode(line, TrainedLine))
        elif self._name in (JUDGEMENTS, EVAL_JUDGEMENTS):
            self._report(key, self._decode(line, ReportLine))
        elif self._name == EVAL_ROLLOUTS:
            report = self._decode(line, ReportLine)
            self._rollout(key, self._decode(line, RolloutLine), report if report and report.is_report else None)
        else:
            self._rollout(key, self._decode(line, RolloutLine))

    def _decode(self, line: bytes, kind: type[L]) -> L | None:
        """The line; None if another run wrote it."""
        found: L = self._decoders[kind].decode(line)  # type: ignore[assignment, index]
        return found if not self._run or found.run in ("", self._run) else None

    def _rollout(self, key: int, found: RolloutLine | None, report: ReportLine | None = None) -> None:
        """report: on this rollout, in the same line, as evaluations of a policy write it."""
        if found is not None:
            self._upsert(self._who(found, found.group_id, found.sibling), {"line": key, **found.row()})
            self._index_words(key, (*found.texts(), *(report.texts() if report is not None else ())))
            if report is not None:
                self._outcome(key, report)

    def _report(self, key: int, found: ReportLine | None) -> None:
        if found is not None:
            self._outcome(key, found)
            self._index_words(key, found.texts())

    def _outcome(self, key: int, found: ReportLine) -> None:
        who = self._who(found, found.group_id, found.sibling)
        of_all, *others = found.outcomes().items()
        self._upsert(who, {"report": key, **of_all[1]})
        for judge, own in others:
            self._write("opinions", {**dict(zip(KEY, who, strict=True)), "judge": judge, **own})
        self._connection.execute(
            "DELETE FROM failures WHERE held_out = ? AND round = ? AND group_id = ? AND sibling = ?", who
        )
        self._connection.executemany(
            "INSERT INTO failures VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(*who, place, *cause) for place, cause in enumerate(found.causes())],
        )

    def _write(self, table: str, row: Mapping[str, object]) -> None:
        places = ", ".join("?" * len(row))
        self._connection.execute(
            f"INSERT OR REPLACE INTO {table} ({', '.join(row)}) VALUES ({places})", [*row.values()]
        )

    def _trained(self, found: TrainedLine | None) -> None:
        if found is not None:
            self._upsert((0, 0, found.group_id, found.sibling), found.row())

    def _group(self, found: GroupLine | None) -> None:
        if found is not None:
            values = (found.step, found.cause or found.outcome, found.group_id)
            update = "UPDATE rollouts SET step = ?, outcome = ? WHERE held_out = 0 AND round = 0 AND group_id = ?"
            self._connection.execute(update, values)

    def _who(self, line: Line, group_id: str, sibling: int) -> tuple[int, int, str, int]:
        return self._held_out, (line.step or 0) if self._held_out else 0, group_id, sibling

    def _upsert(self, who: tuple[int, int, str, int], row: Mapping[str, object]) -> None:
        names = (*KEY, *row)
        changed = ", ".join(f"{name} = excluded.{name}" for name in row)
        self._connection.execute(
            f"INSERT INTO rollouts ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET {changed}", (*who, *row.values())
        )  # fmt: skip

    def _index_words(self, key: int, texts: Iterable[str]) -> None:
        self._connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (key, "\n".join(texts)))
