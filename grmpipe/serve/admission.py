"""Which question goes first, and which is refused, where several clients ask one service."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Refused(Exception):
    """A question that isn't judged. status: of HTTP."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Admission:
    """Start-time fair queuing (Goyal, Vin, Cheng, 1996): a question's priority is the sum of what its client asked
    before, begun anew where the service stands if the client was idle. The judges' own queues, which let the lowest
    priority go first, then serve clients in turn, whoever has more waiting; one alone gets everything.

    most: responses that may be in flight. Above it only a client is refused that has its share of them, so that one
    that floods the service shuts no other out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_flight = Counter[str]()  # responses by client; no zeros
        self._next: dict[str, int] = {}  # client -> the priority of its next question, of those in flight
        self._now = 0  # the highest priority of a question that has ended

    @property
    def in_flight(self) -> int:
        return self._in_flight.total()

    @contextmanager
    def admit(self, client: str, size: int) -> Iterator[int]:
        """Context of a question of `size` responses: its priority. Raises Refused."""
        clients = len(self._in_flight.keys() | {client})
        if self.in_flight + size > self._most and self._in_flight[client] + size > self._most // clients:
            raise Refused(
                429, f"{self._in_flight[client]} of your responses are being judged, {self.in_flight} in all; "
                f"serve.max_in_flight={self._most}: ask again"
            )  # fmt: skip
        priority = max(self._now, self._next.get(client, 0))
        self._next[client] = priority + size
        self._in_flight[client] += size
        try:
            yield priority
        finally:
            self._now = max(self._now, priority)
            self._in_flight[client] -= size
            if not self._in_flight[client]:
                del self._in_flight[client], self._next[client]
