"""The guard: errors in observing are counted and logged, and never fail a step."""

import logging
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass

from grmpipe.config.keys.user_code import describe_error

log = logging.getLogger(__name__)


class Guard:
    """`with guard.watch("wandb"): ...` swallows exceptions. `failures` counts them by observer, `causes` has the first
    one of each, in words.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.causes: dict[str, str] = {}
        self._logged: set[tuple[str, type[Exception], object]] = set()

    def watch(self, observer: str) -> AbstractContextManager[None]:
        return _Watch(self, observer)

    def note(self, observer: str, error: Exception) -> None:
        """Count an error, and log the first of its kind."""
        self.failures[observer] += 1
        # By type and errno, not by message: a message with the step in it would fill the log.
        cause = (observer, type(error), getattr(error, "errno", None))
        if cause not in self._logged:
            self._logged.add(cause)
            words = describe_error(error)  # an exception of a user's tracker may have no text
            self.causes.setdefault(observer, words)
            log.warning("%s failed, the run continues without it: %s", observer, words, exc_info=error)


@dataclass(slots=True, eq=False)
class _Watch:
    """`Guard.watch`: entered for every line of a journal."""

    guard: Guard
    observer: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.guard.note(self.observer, error)
        return True
