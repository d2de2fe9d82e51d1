"""Limits on requests and tokens per minute, enforced before sending: token buckets on the event loop's clock."""

import asyncio

from grmpipe.models.request_gates import PriorityGate
from grmpipe.scheduler.clock import RESOLUTION_S

BURST_S = 1.0  # capacity of a bucket, in seconds of its rate; a minute's worth could all go out at once


class Bucket:
    """A token bucket: fills at `per_minute`, holds a second's worth, at least one. Pure: times are passed in.

    A need greater than the bucket is served when it is full, and leaves it in debt: over any time T at most per_minute
    * T + the capacity + the last need goes out.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._per_s = per_minute / 60
        self._room = max(1.0, self._per_s * BURST_S)
        self._level = self._room
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until this amount may go; 0: now."""
        self._fill(now_s)
        wait_s = (min(amount, self._room) - self._level) / self._per_s
        return wait_s if wait_s > RESOLUTION_S else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount; a negative one is given back."""
        self._fill(now_s)
        self._level = min(self._room, self._level - amount)

    def _fill(self, now_s: float) -> None:
        self._level = min(self._room, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s


class RateLimits:
    """Releases requests under two limits, the lowest priority number first, then the oldest. 0: no limit."""

    def __init__(self, *, requests_per_minute: int, tokens_per_minute: int) -> None:
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self._requests = Bucket(requests_per_minute, now_s) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute, now_s) if tokens_per_minute else None
        self._waiting = PriorityGate()
        self._timer: asyncio.TimerHandle | None = None

    async def admit(self, num_tokens: int, priority: int) -> None:
        """Return when a request of up to `num_tokens` tokens may be sent."""
        turn = self._waiting.join(priority, num_tokens)
        self._let_out()
        try:
            await self._waiting.wait_for_turn(turn, lambda: self._take(-1, -num_tokens))
        except asyncio.CancelledError:
            self._let_out()
            raise

    def settle(self, num_expected: int, num_used: int) -> None:
        """Give back the tokens that were expected but not used, after the answer."""
        if self._tokens is not None and num_used != num_expected:
            self._tokens.take(num_used - num_expected, self._loop.time())
            self._let_out()

    def _let_out(self) -> None:
        """Release as many as may go now; set a timer for the next."""
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
