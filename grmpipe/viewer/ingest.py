"""Writes the lines of journals into the tables of an index."""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from grmpipe.observe.eval_recorder import EVAL_JUDGEMENTS, EVAL_ROLLOUTS
from grmpipe.observe.recorder import GROUPS, JUDGEMENTS, ROLLOUTS, TRAINED
from grmpipe.observe.run_files import JUDGED
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

MOST_DETAIL = 300  # characters of what is said of a failed judgement
# A journal's place is its number in the keys.
WITH_TEXT = (ROLLOUTS, JUDGEMENTS, EVAL_ROLLOUTS, EVAL_JUDGEMENTS, JUDGED)
HELD_OUT = (EVAL_ROLLOUTS, EVAL_JUDGEMENTS)
LABELLED = "labelled work"  # an evaluation of the judge: no name of prompts has a space
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
