"""timeline.json: spans of the run as a Chrome trace, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import AppendFile
from grmpipe.observe.plain_json import json_bytes
from grmpipe.scheduler.events import EventSink, NoEvents

SPILL_EVENTS = 256  # kept in memory, at most
SPILL_AFTER_S = 5.0  # a kill loses at most this much of the run's time
CLOSING = b"\n]\n"
ROWS_PER_LANE = 512  # more than the requests in an engine's batch


class Timeline:
    """An EventSink that writes timeline.json: an array with one event per line, written in pieces. A killed run leaves
    out the closing bracket, which the format allows. A resumed run continues in the same file, as another process.

    I/O errors never surface: `failures` counts them.
    """

    def __init__(self, path: Path, run_id: str = "", others: EventSink | None = None) -> None:
        """others: get every span, too."""
        self._others = others or NoEvents()
        self._file = AppendFile(path)
        self._lanes = Lanes()
        self._pending: list[bytes] = []
        self._spilled_s = -float("inf")
        # Not the process id: in a container every part of a resumed run may have the same id.
        self._pid = int(time.time())
        self._opened = False
        self._guard = Guard()
        self.failures = self._guard.failures
        name = " ".join(filter(None, ("grmpipe", run_id)))
        self._put("M", "process_name", 0, args={"name": f"{name}, started {time.strftime('%Y-%m-%d %H:%M:%S')}"})

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        """Record a span. Overlapping spans of a lane get their own rows, "policy-0 · 2" and so on."""
        self._others.span(lane, name, start_s, end_s, **args)
        row = self._lanes.place(lane, start_s, end_s)
        if row is not None:
            if row.num_spans == 1:
                self._introduce(row)
            start_us, end_us = micros(start_s), micros(max(start_s, end_s))
            self._put("X", name, row.tid, ts=start_us, dur=end_us - start_us, args=args)
            self._spill_when_due(end_s)

    def flush(self) -> None:
        """Write to the operating system now. Events of a failed write are lost: memory stays bounded."""
        pending, self._pending = self._pending, []
        with self._guard.watch(self._file.path.name):
            self._append(b"".join(event + b",\n" for event in pending))

    def close(self) -> None:
        """End the array: the file is valid JSON from here on."""
        self.flush()
        left_out = self._lanes.num_crowded_out
        label = f"{left_out} spans left out: a lane has too few rows" if left_out else "complete"
        self._put("M", "process_labels", 0, args={"labels": label})
        with self._guard.watch(self._file.path.name):
            self._append(self._pending.pop() + CLOSING)
            self._file.close()

    def _introduce(self, row: LaneRow) -> None:
        self._put("M", "thread_name", row.tid, args={"name": row.title})
        self._put("M", "thread_sort_index", row.tid, args={"sort_index": row.tid})

    def _put(self, phase: str, name: str, tid: int, **rest: object) -> None:
        event = {"ph": phase, "name": name, "pid": self._pid, "tid": tid, **rest}
        self._pending.append(json_bytes(event, strict=True))

    def _spill_when_due(self, now_s: float) -> None:
        if len(self._pending) >= SPILL_EVENTS or now_s - self._spilled_s > SPILL_AFTER_S:
            self._spilled_s = now_s
            self.flush()

    def _append(self, piece: bytes) -> None:
        if not self._opened:
            reopen_array(self._file)
            self._opened = True
        self._file.append(piece)


def micros(time_s: float) -> int:
    return round(time_s * 1e6)


def reopen_array(append_file: AppendFile) -> None:
    """Begin the array, or remove its closing bracket."""
    file = append_file.open()
    end = file.tell()
    if end == 0:
        append_file.append(b"[\n")
        return
    file.seek(max(0, end - len(CLOSING)))
    if file.read(len(CLOSING)) == CLOSING:
        file.truncate(end - len(CLOSING))
        file.seek(end - len(CLOSING))
        append_file.append(b",\n")


@dataclass(slots=True, kw_only=True)
class LaneRow:
    """One row of the timeline. Chrome sorts rows by number and shows an overlap within one as a call stack."""

    tid: int
    title: str
    end_s: float  # its last span's
    num_spans: int = 1


class Lanes:
    """Assigns rows to spans. Spans come when they end; each takes the first row that was free since it began."""

    def __init__(self, rows_per_lane: int = ROWS_PER_LANE) -> None:
        self._rows_per_lane = rows_per_lane
        self._rows: dict[str, list[LaneRow]] = {}
        self._first_tids: dict[str, int] = {}
        self.num_crowded_out = 0

    def place(self, lane: str, start_s: float, end_s: float) -> LaneRow | None:
        """The row of a span. None if more spans overlap than a lane has rows: a wrong picture is worse than a gap."""
        rows = self._rows.get(lane)
        if rows is None:
            rows = self._rows[lane] = []
            self._first_tids[lane] = len(self._rows) * self._rows_per_lane
        for row in rows:
            if row.end_s <= start_s:
                row.end_s = end_s
                row.num_spans += 1
                return row
        if len(rows) == self._rows_per_lane:
            self.num_crowded_out += 1
            return None
        title = f"{lane} · {len(rows) + 1}" if rows else lane
        rows.append(LaneRow(tid=self._first_tids[lane] + len(rows), title=title, end_s=end_s))
        return rows[-1]
