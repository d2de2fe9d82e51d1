"""Rows of a timeline: the row of its lane in which a span is drawn, so that none overlap. Pure."""

from __future__ import annotations

from dataclasses import dataclass

ROWS_PER_LANE = 512  # more than the requests in an engine's batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """One row of the timeline. Chrome sorts rows by number and shows an overlap within one as a call stack."""

    tid: int
    title: str
    new: bool  # not yet declared in the trace


class Lanes:
    """Assigns rows to spans. Spans come when they end; each takes the first row that was free since it began."""

    def __init__(self, rows_per_lane: int = ROWS_PER_LANE) -> None:
        self._rows_per_lane = rows_per_lane
        self._last_end_s: dict[str, list[float]] = {}  # lane -> the last end in each of its rows
        self._numbers: dict[str, int] = {}
        self.num_crowded_out = 0

    def place(self, lane: str, start_s: float, end_s: float) -> LaneRow | None:
        """The row of a span. None if more spans overlap than a lane has rows: a wrong picture is worse than a gap."""
        ends_s = self._last_end_s.setdefault(lane, [])
        for index, last_end_s in enumerate(ends_s):
            if last_end_s <= start_s:
                ends_s[index] = end_s
                return self._row(lane, index, new=False)
        if len(ends_s) == self._rows_per_lane:
            self.num_crowded_out += 1
            return None
        ends_s.append(end_s)
        return self._row(lane, len(ends_s) - 1, new=True)

    def _row(self, lane: str, index: int, *, new: bool) -> LaneRow:
        number = self._numbers.setdefault(lane, len(self._numbers) + 1)
        title = lane if index == 0 else f"{lane} · {index + 1}"
        return LaneRow(tid=number * self._rows_per_lane + index, title=title, new=new)
