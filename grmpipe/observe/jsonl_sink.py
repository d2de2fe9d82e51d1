"""metrics.jsonl: one JSON object per step, readable during the run."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from grmpipe.observe.journal import Journal, read_what_can_be, replace_journal
from grmpipe.observe.plain_json import finite
from grmpipe.trackers.tracker import Tracker
from grmpipe.types import Metrics

log = logging.getLogger(__name__)


class JsonlSink(Tracker):
    """Writes `{"step": n, "time": seconds since 1970, name: value, ..., "run": id}`; numbers that aren't finite become
    null.
    """

    def __init__(self, path: Path, run_id: str = "", now: Callable[[], float] = time.time) -> None:
        self._journal = Journal(path, run_id=run_id, checked=False)
        self._run_id = run_id
        self._now = now

    def log(self, step: int, metrics: Metrics) -> None:
        values = {name: finite(value) for name, value in metrics.items()}
        self._journal.append({"step": step, "time": round(self._now(), 3), **values})

    def close(self) -> None:
        self._journal.close()

    def truncate_after(self, step: int) -> None:
        """Remove the steps after a checkpoint. Atomic; a torn last line and unreadable lines are removed too.

        Metrics are for display only: neither a damaged line nor a full disk stops a run.
        """
        self.close()
        path = self._journal.path
        try:
            kept = [record for record in read_what_can_be(path) if is_up_to(record.get("step"), step)]
            if path.exists():
                replace_journal(path, kept, run_id=self._run_id, checked=False)
        except OSError as error:
            log.warning("%s keeps lines after step %d: it can't be rewritten (%s)", path, step, error)


def is_up_to(found: object, step: int) -> bool:
    return isinstance(found, int) and found <= step
