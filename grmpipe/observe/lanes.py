"""Rows of a timeline: which row of its lane a span stands in, so that none overlap. Pure."""

from __future__ import annotations

from dataclasses import dataclass

ROWS_PER_LANE = 512  # above what an engine has in its batch: a profile is read from these spans


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """One line of the picture. Chrome sorts rows by number and takes an overlap within one for a call stack."""

    tid: int
    title: str
    new: bool  # not yet introduced


class Lanes:
    """Spans come when they end; each takes the first row that was free since it began."""

    def __init__(self, rows_per_lane: int = ROWS_PER_LANE) -> None:
        self._rows_per_lane = rows_per_lane
        self._last_end_s: dict[str, list[float]] = {}  # of each row of a lane
        self._numbers: dict[str, int] = {}
        self.num_crowded_out = 0

    def place(self, lane: str, start_s: float, end_s: float) -> LaneRow | None:
        """None when more spans overlap than a lane has rows: a false picture would be worse than a gap."""
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
