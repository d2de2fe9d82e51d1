"""One delivery of a bucket in a thread of its own, while its caller makes the next bucket."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Delivery:
    """At most one is under way. Its error is raised by `end`, or dropped by `drop`."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def begin(self, deliver: Callable[[], None]) -> None:
        """Return at once. An earlier delivery that was not ended is waited for, and its error dropped."""
        self.drop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delivery")
        self._under_way = self._thread.submit(deliver)

    def end(self) -> None:
        """Wait for the delivery under way, if there is one. Raises its error."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def drop(self) -> None:
        """Wait until nothing is under way: a broadcast without a peer ends at its own timeout."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.exception()

    def close(self) -> None:
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
