"""Counts of the workers of a host. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OpenedEnvs:
    """Workers of a host. Once it is closed, each that was opened has ended in one way: opened == closed + killed.

    closed: ended by themselves, in time. killed: ended by a signal: a limit, a fault, or deaf to `close`.
    """

    opened: int = 0
    closed: int = 0
    killed: int = 0

    @property
    def open(self) -> int:
        return self.opened - self.closed - self.killed

    def add(self, other: OpenedEnvs) -> None:
        self.opened += other.opened
        self.closed += other.closed
        self.killed += other.killed

    def since(self, before: OpenedEnvs) -> OpenedEnvs:
        """What was added to earlier counts; nothing if these are the earlier ones."""
        return OpenedEnvs(
            opened=max(0, self.opened - before.opened),
            closed=max(0, self.closed - before.closed),
            killed=max(0, self.killed - before.killed),
        )
