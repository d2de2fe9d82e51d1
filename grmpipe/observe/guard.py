"""The guard: errors in observing are counted and logged, and never fail a step."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Guard:
    """`with guard.watch("wandb"): ...` swallows exceptions. `failures` counts them by observer."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._logged: set[tuple[str, type[Exception], object]] = set()

    @contextmanager
    def watch(self, observer: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures[observer] += 1
            self._log_once(observer, error)

    def _log_once(self, observer: str, error: Exception) -> None:
        # By type and errno, not by message: a message with the step in it would fill the log.
        cause = (observer, type(error), getattr(error, "errno", None))
        if cause not in self._logged:
            self._logged.add(cause)
            log.warning("%s failed, the run continues without it: %r", observer, error, exc_info=error)
