"""Counts of the seats of a host. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SeatCounts:
    """Seats of a host. Once it is closed, each that was opened has ended in one way: opened == closed + killed.

    closed: ended by themselves, in time. killed: ended by a signal: a limit, a fault, or deaf to `close`.
    """

    opened: int = 0
    closed: int = 0
    killed: int = 0
