"""Seconds of work at a changing rate: zero in a pause, less on a shared device. Pure: times are passed in."""

import math
from typing import Protocol


class SimulatedRate:
    """The work done by a time, and the time when a given amount will be done."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._since_s = 0.0
        self._worked_s = 0.0  # by then

    def measure_work_s(self, now_s: float) -> float:
        return self._worked_s + (now_s - self._since_s) * self._rate

    def set_rate(self, now_s: float, rate: float) -> bool:
        """Work at `rate` from now on (1: alone on the device). Returns False if nothing changed."""
        if rate == self._rate:
            return False
        self._worked_s, self._since_s, self._rate = self.measure_work_s(now_s), now_s, rate
        return True

    def when_s(self, worked_s: float) -> float:
        """The time at which this much work will be done at the present rate; infinity in a pause."""
        if not self._rate or worked_s == math.inf:
            return math.inf
        return self._since_s + (worked_s - self._worked_s) / self._rate


class Tenant(Protocol):
    """A process on a device."""

    def share_changed(self, share: float) -> None: ...


class SharedDevice:
    """A device shared by processes: busy ones get equal shares, and none more than a whole.

    capacity: number of processes at full speed: 1 for a GPU, the number of cores for a machine.
    context_switch_cost: share of work lost to switches, for each further process per core.
    """

    def __init__(self, capacity: int = 1, context_switch_cost: float = 0.0) -> None:
        self._capacity = capacity
        self._turn_cost = context_switch_cost
        self._busy: dict[Tenant, None] = {}
        self._share = 1.0

    def occupy(self, tenant: Tenant) -> None:
        self._busy[tenant] = None
        if not self._divide():
            tenant.share_changed(self._share)

    def vacate(self, tenant: Tenant) -> None:
        del self._busy[tenant]
        self._divide()

    def _divide(self) -> bool:
        """Update the shares. Returns False if they stay the same."""
        turns = 1 + self._turn_cost * max(0, len(self._busy) - self._capacity) / self._capacity
        share = min(1.0, self._capacity / max(1, len(self._busy))) / turns
        if share == self._share:
            return False
        self._share = share
        for tenant in tuple(self._busy):
            tenant.share_changed(share)
        return True
