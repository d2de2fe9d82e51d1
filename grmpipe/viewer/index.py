"""The index of a run: an SQLite file in the user's cache, which follows the journals. Never writes into the run.

    index = RunIndex(run_dir)
    for progress in index.follow(): ...     # reads what is new since the last time, in pieces

A torn last line waits until it is whole; a line that can't be read is counted and left out. If a journal was cut or
rewritten since, or the directory holds another run, the index starts over.
"""

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from grmpipe.config.run_config import ConfigError
from grmpipe.observe.journal import TAIL_BYTES, Mark, ascii_text, mark_holds
from grmpipe.observe.recorder import EVAL_JUDGEMENTS, EVAL_ROLLOUTS, GROUPS, JUDGEMENTS, ROLLOUTS, TRAINED
from grmpipe.observe.run_files import JUDGED
from grmpipe.run_dir.identity import read_run_id
from grmpipe.viewer.journal_lines import (
    FailedLine,
    GroupLine,
    ItemLine,
    L,
    Line,
    ReportLine,
    RolloutLine,
    TrainedLine,
    read_line,
)
from grmpipe.viewer.queries import LABELLED

FORMAT = "7"  # the index's; one of another format is made again
# What a line refers to was written before it. So the sizes are taken from the end of this list to its beginning.
JOURNALS = (ROLLOUTS, EVAL_ROLLOUTS, JUDGEMENTS, EVAL_JUDGEMENTS, TRAINED, GROUPS, JUDGED)
PIECE_BYTES = 32_000_000  # between two commits
PRAGMAS = """
    PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536; PRAGMA secure_delete = OFF;
"""


def cache_dir() -> Path:
    """The folder of all indexes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grmpipe" / "viewer"


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
            sizes = {name: read_size(self.run_dir / name) for name in reversed(JOURNALS)}
            yield self._progress(connection, sizes)
            for name in JOURNALS:
                for _ in self._read_journal(connection, name, sizes[name]):
                    yield self._progress(connection, sizes)

    def progress(self) -> IndexProgress:
        """How far the index is. Raises sqlite3.Error before the first `follow`."""
        with contextlib.closing(self.read()) as connection:
            return self._progress(connection, {name: read_size(self.run_dir / name) for name in JOURNALS})

    # -- the file ------------------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_new = not self.path.exists()
        connection = sqlite3.connect(self.path, timeout=30)
        self.path.chmod(0o600)
        connection.executescript(PRAGMAS)
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
                inode == read_inode(self.run_dir / name)
                and mark_holds(self.run_dir / name, Mark(offset=at, after=after))
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
        ingest = Ingest(connection, path, run_id(self.run_dir))
        while True:
            connection.execute("BEGIN IMMEDIATE")
            found = connection.execute("SELECT offset, unreadable FROM journals WHERE name = ?", (name,)).fetchone()
            begin, unreadable = found or (0, 0)
            piece = whole_lines(path, begin, size) if begin < size else b""
            if piece:
                unreadable += ingest.lines(begin, piece)
                values = (name, begin + len(piece), ascii_text(piece[-TAIL_BYTES:]), read_inode(path), unreadable)
                connection.execute("INSERT OR REPLACE INTO journals VALUES (?, ?, ?, ?, ?)", values)
            connection.commit()
            if not piece:
                return
            yield


def run_id(run_dir: Path) -> str:
    """The run's id; empty if it has none that can be read."""
    with contextlib.suppress(ConfigError, OSError):
        return read_run_id(run_dir)
    return ""


def read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_inode(path: Path) -> int:
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


# -- lines of journals into tables -------------------------------------------------------------------------------------


MOST_DETAIL = 300  # characters of what is said of a failed judgement
# A journal's place is its number in the keys.
WITH_TEXT = (ROLLOUTS, JUDGEMENTS, EVAL_ROLLOUTS, EVAL_JUDGEMENTS, JUDGED)
HELD_OUT = (EVAL_ROLLOUTS, EVAL_JUDGEMENTS)
KEY = ("evaluation", "round", "group_id", "sibling")
W = TypeVar("W", RolloutLine, ReportLine)


def place_of_key(key: int) -> tuple[str, int]:
    """The journal and the offset of a line, by its key."""
    return WITH_TEXT[key % len(WITH_TEXT)], key // len(WITH_TEXT)


class Ingest:
    """Writes the lines of one journal into the index."""

    def __init__(self, connection: sqlite3.Connection, path: Path, run: str) -> None:
        self._connection = connection
        self._path = path
        self._name = name = path.name
        self._run = run
        self._held_out = name in HELD_OUT
        self._number = WITH_TEXT.index(name) if name in WITH_TEXT else 0
        self._noted: set[tuple[str, str]] = set()

    def lines(self, offset: int, piece: bytes) -> int:
        """The number of lines that can't be read. Nothing of them is written: each is read before its first row is."""
        unreadable = 0
        for line in piece.split(b"\n")[:-1]:
            try:
                self._line(offset * len(WITH_TEXT) + self._number, line)
            except ValueError:
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
        elif self._name == JUDGED:
            self._item(key, self._decode(line, ItemLine))
        else:
            self._rollout(key, self._decode(line, RolloutLine))

    def _decode(self, line: bytes, kind: type[L]) -> L | None:
        """The line; None if another run wrote it."""
        found = read_line(line, kind)
        return found if not self._run or found.run in ("", self._run) else None

    def _rollout(self, key: int, found: RolloutLine | None) -> None:
        if found is not None:
            row = found.row()
            id_, old = self._store(self._who(found, found.group_id, found.sibling), {"line": key, **row}, found)
            self._write("snippets", {"id": id_, **found.snippets()})
            self._note("evaluation", found.prompts if self._held_out else "")
            self._note("source", row["source"])
            self._note("status", row["status"])
            for fault in str(row["faults"]).split():
                self._note("fault", fault)
            self._index_words(2 * id_, old, found)

    def _report(self, key: int, found: ReportLine | None) -> None:
        if found is not None:
            of_all, *others = found.outcomes().items()
            who = self._who(found, found.group_id, found.sibling)
            id_, old = self._store(who, {"report": key, **of_all[1]}, found)
            self._note("failure", of_all[1]["failure"])
            for judge, own in others:
                self._note("judge", judge)
                self._note("failure", own["failure"])
                self._write("opinions", {"id": id_, "judge": judge, **own})
            self._failures(id_, found.failures)
            self._index_words(2 * id_ + 1, old, found)

    def _item(self, key: int, found: ItemLine | None) -> None:
        """The responses of a labelled item, as the siblings of a group."""
        if found is None:
            return
        for sibling in range(len(found.responses)):
            row = found.row(sibling)
            id_, _ = self._store((LABELLED, 0, found.item_id, sibling), {"line": key, **row})
            self._write("snippets", {"id": id_, **found.snippets(sibling)})
            for field in ("source", "outcome", "failure"):
                self._note(field, row[field])
            self._note("evaluation", LABELLED)
            for judge, own in found.by_judge.items():
                self._note("judge", judge)
                self._write("opinions", {"id": id_, "judge": judge, **own.describe(sibling)})
            self._failures(id_, [failed for failed in found.failures if failed.sibling == sibling])
            self._add_words(2 * id_, found.texts(sibling))
            self._add_words(2 * id_ + 1, found.texts_about(sibling))

    def _failures(self, id_: int, found: Sequence[FailedLine]) -> None:
        self._connection.execute("DELETE FROM failures WHERE id = ?", (id_,))
        for place, failed in enumerate(found):
            self._note("cause", failed.cause)
            row = {"judge": failed.judge, "cause": failed.cause, "detail": failed.detail[:MOST_DETAIL]}
            self._write("failures", {"id": id_, "place": place, **row})

    def _write(self, table: str, row: Mapping[str, object]) -> None:
        places = ", ".join("?" * len(row))
        self._connection.execute(
            f"INSERT OR REPLACE INTO {table} ({', '.join(row)}) VALUES ({places})", [*row.values()]
        )

    def _trained(self, found: TrainedLine | None) -> None:
        if found is not None:
            self._store(("", 0, found.group_id, found.sibling), found.row())

    def _group(self, found: GroupLine | None) -> None:
        if found is not None:
            outcome = found.cause or found.outcome
            self._note("outcome", outcome)
            values = (found.step, outcome, found.group_id)
            update = "UPDATE rollouts SET step = ?, outcome = ? WHERE evaluation = '' AND round = 0 AND group_id = ?"
            self._connection.execute(update, values)

    def _who(self, line: Line, group_id: str, sibling: int) -> tuple[str, int, str, int]:
        return (line.prompts, line.step or 0, group_id, sibling) if self._held_out else ("", 0, group_id, sibling)

    def _store(
        self, who: tuple[str, int, str, int], row: Mapping[str, object], line: W | None = None
    ) -> tuple[int, W | None]:
        """Write these fields of a rollout, the first of which is the key of the line. Its id, and the line that this
        one replaces, which is read before anything is written.
        """
        before = next(iter(row)) if line is not None else "NULL"
        where = " AND ".join(f"{name} = ?" for name in KEY)
        found = self._connection.execute(f"SELECT id, {before} FROM rollouts WHERE {where}", who).fetchone()
        if found is None:
            names = (*KEY, *row)
            insert = f"INSERT INTO rollouts ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
            return self._connection.execute(insert, (*who, *row.values())).lastrowid or 0, None
        old = self._read_again(found[1], type(line)) if line is not None and found[1] is not None else None
        changed = ", ".join(f"{name} = ?" for name in row)
        self._connection.execute(f"UPDATE rollouts SET {changed} WHERE id = ?", (*row.values(), found[0]))
        return found[0], old

    def _read_again(self, key: int, kind: type[W]) -> W:
        with self._path.open("rb") as file:
            file.seek(key // len(WITH_TEXT))
            return read_line(file.readline(), kind)

    def _note(self, field: str, value: object) -> None:
        """Offer a value in the form of the table."""
        one = (field, str(value or ""))
        if one[1] and one not in self._noted:
            self._noted.add(one)
            self._connection.execute("INSERT OR IGNORE INTO choices VALUES (?, ?)", one)

    def _index_words(self, place: int, old: W | None, found: W) -> None:
        """old: the line that this one replaces, whose words are forgotten."""
        if old is not None:
            self._connection.execute(
                "INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)", (place, "\n".join(old.texts()))
            )
        self._add_words(place, found.texts())

    def _add_words(self, place: int, texts: Iterable[str]) -> None:
        self._connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (place, "\n".join(texts)))
