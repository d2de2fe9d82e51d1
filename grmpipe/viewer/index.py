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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from grmpipe.config.run_config import ConfigError
from grmpipe.observe.eval_recorder import EVAL_JUDGEMENTS, EVAL_ROLLOUTS
from grmpipe.observe.journal import TAIL_BYTES, Mark, ascii_text, mark_holds
from grmpipe.observe.recorder import GROUPS, JUDGEMENTS, ROLLOUTS, TRAINED
from grmpipe.observe.run_files import JUDGED
from grmpipe.run_dir.identity import read_run_id
from grmpipe.viewer.ingest import Ingest

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
