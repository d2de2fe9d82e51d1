"""Seconds of work at a pace that changes: none in a pause, less where a device is shared. Pure: it is told the time."""

from __future__ import annotations

import math
from typing import Protocol


class Pace:
    """How much work was done by a moment, and when a given amount will be."""

    def __init__(self) -> None:
        self._pace = 0.0
        self._since_s = 0.0
        self._worked_s = 0.0  # by then

    def worked_s(self, now_s: float) -> float:
        return self._worked_s + (now_s - self._since_s) * self._pace

    def turn(self, now_s: float, pace: float) -> bool:
        """From now on go at `pace` (1: the device alone). False: nothing changed."""
        if pace == self._pace:
            return False
        self._worked_s, self._since_s, self._pace = self.worked_s(now_s), now_s, pace
        return True

    def when_s(self, worked_s: float) -> float:
        """The moment at which this much work will be done, at the pace of now; infinity in a pause."""
        if not self._pace or worked_s == math.inf:
            return math.inf
        return self._since_s + (worked_s - self._worked_s) / self._pace


class Tenant(Protocol):
    """Somebody who works on a device."""

    def share_changed(self, share: float) -> None: ...


class SharedDevice:
    """A device that several processes are placed on: those that are busy get equal shares of it."""

    def __init__(self) -> None:
        self._busy: list[Tenant] = []

    def occupy(self, tenant: Tenant) -> None:
        self._busy.append(tenant)
        self._tell()

    def vacate(self, tenant: Tenant) -> None:
        self._busy.remove(tenant)
        self._tell()

    def _tell(self) -> None:
        for tenant in self._busy:
            tenant.share_changed(1 / len(self._busy))
