"""Requests and tokens per minute, kept before sending: token buckets on the event loop's clock. It sends nothing."""

from __future__ import annotations

import asyncio

from models.priority_gate import PriorityGate
from scheduler.clock import RESOLUTION_S

BURST_S = 1.0  # what a full bucket lets through at once, in seconds of its rate


class Bucket:
    """Fills at `per_minute`, holds a second's worth, at least one. Pure: times are the caller's.

    Whoever needs more than it holds goes when it is full, and leaves it in debt: over any time T no more goes out than
    per_minute * T + what it holds + the last one's need.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._per_s = per_minute / 60
        self._room = max(1.0, self._per_s * BURST_S)
        self._level = self._room
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much may go; 0: now."""
        self._fill(now_s)
        wait_s = (min(amount, self._room) - self._level) / self._per_s
        return wait_s if wait_s > RESOLUTION_S else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """A negative amount is given back."""
        self._fill(now_s)
        self._level = min(self._room, self._level - amount)

    def _fill(self, now_s: float) -> None:
        self._level = min(self._room, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s


class RateLimits:
    """Lets requests out as two limits allow, the lowest priority number first, then the oldest. 0 is no limit."""

    def __init__(self, *, requests_per_minute: int, tokens_per_minute: int) -> None:
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self._requests = Bucket(requests_per_minute, now_s) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute, now_s) if tokens_per_minute else None
        self._waiting = PriorityGate()
        self._timer: asyncio.TimerHandle | None = None

    async def admit(self, num_tokens: int, priority: int) -> None:
        """Return when a request that may use so many tokens may be sent."""
        turn = self._waiting.join(priority, num_tokens)
        self._let_out()
        try:
            await self._waiting.passed(turn, lambda: self._take(-1, -num_tokens))
        except asyncio.CancelledError:
            self._let_out()
            raise

    def settle(self, num_expected: int, num_used: int) -> None:
        """The answer came, with its count of tokens: what was expected too much is given back."""
        if self._tokens is not None and num_used != num_expected:
            self._tokens.take(num_used - num_expected, self._loop.time())
            self._let_out()

    def _let_out(self) -> None:
        """As many as may go now; a timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (num_tokens := self._waiting.first_amount) is not None:
            if (wait_s := self._wait_s(num_tokens)) > 0:
                self._timer = self._loop.call_later(wait_s, self._let_out)
                return
            self._take(1, num_tokens)
            self._waiting.let_one()

    def _wait_s(self, num_tokens: int) -> float:
        now_s = self._loop.time()
        needs = ((self._requests, 1), (self._tokens, num_tokens))
        return max((bucket.wait_s(amount, now_s) for bucket, amount in needs if bucket is not None), default=0.0)

    def _take(self, num_requests: int, num_tokens: int) -> None:
        now_s = self._loop.time()
        if self._requests is not None:
            self._requests.take(num_requests, now_s)
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)
