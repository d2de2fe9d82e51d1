"""timeline.json: spans of the run as a Chrome trace, for chrome://tracing and ui.perfetto.dev. Draws nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from grmpipe.observe.guard import Guard
from grmpipe.observe.lanes import Lanes, Row
from grmpipe.observe.plain_json import plain

SPILL_EVENTS = 256  # kept in memory at most
SPILL_AFTER_S = 5.0  # a crash loses no more of the run's time than this


class Timeline:
    """An EventSink. The file is an array of one event a line, written in pieces; a run that was killed leaves out the
    closing bracket, which the format allows. A resumed run goes on in the same file as a process of its own.

    I/O errors never surface: `failures` counts them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lanes = Lanes()
        self._pending: list[str] = []
        self._file: BinaryIO | None = None
        self._pid = os.getpid()
        self._spilled_s = -float("inf")
        self._closed = False
        self._guard = Guard()
        self.failures = self._guard.failures
        self._put({"ph": "M", "name": "process_name", "tid": 0, "args": {"name": f"grmpipe, process {self._pid}"}})

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        row = self._lanes.place(lane, start_s, end_s)
        if row is None:
            return
        self._introduce(row)
        times = {"ts": micros(start_s), "dur": micros(max(0.0, end_s - start_s))}
        self._put({"ph": "X", "name": name, "tid": row.tid, **times, "args": args})
        self._spill_when_due(end_s)

    def instant(self, lane: str, name: str, time_s: float, **args: str | int | float) -> None:
        """A moment: a crash, an alarm, a switch."""
        row = self._lanes.first(lane)
        self._introduce(row)
        self._put({"ph": "i", "s": "t", "name": name, "tid": row.tid, "ts": micros(time_s), "args": args})
        self._spill_when_due(time_s)

    def flush(self) -> None:
        """To the operating system, now."""
        with self._guard.watch(self._path.name):
            pieces, self._pending = self._pending, []
            if pieces:
                self._write(b"".join(b",\n" + piece.encode("utf-8", "replace") for piece in pieces))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lanes.num_crowded_out:
            text = f"{self._lanes.num_crowded_out} spans left out: more at once on a lane than it has rows"
            self._put({"ph": "M", "name": "process_labels", "tid": 0, "args": {"labels": text}})
        self.flush()
        with self._guard.watch(self._path.name):
            if self._file is not None:
                self._file.write(b"\n]\n")
                self._file.close()

    def _introduce(self, row: Row) -> None:
        if row.new:
            self._put({"ph": "M", "name": "thread_name", "tid": row.tid, "args": {"name": row.title}})
            self._put({"ph": "M", "name": "thread_sort_index", "tid": row.tid, "args": {"sort_index": row.tid}})

    def _put(self, event: dict[str, object]) -> None:
        self._pending.append(json.dumps(plain({"pid": self._pid, **event}), ensure_ascii=False))

    def _spill_when_due(self, now_s: float) -> None:
        if len(self._pending) >= SPILL_EVENTS or now_s - self._spilled_s > SPILL_AFTER_S:
            self._spilled_s = now_s
            self.flush()

    def _write(self, piece: bytes) -> None:
        if self._file is None:
            self._file, empty = open_array(self._path)
            piece = piece.removeprefix(b",\n") if empty else piece
        self._file.write(piece)


def micros(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def open_array(path: Path) -> tuple[BinaryIO, bool]:
    """The file, open behind its last whole event; and whether the array is still empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    file = path.open("r+b", buffering=0)
    end = file.read().rfind(b"}") + 1
    file.seek(0)
    file.truncate(end)
    if end == 0:
        file.write(b"[\n")
    file.seek(0, 2)
    return file, end == 0
