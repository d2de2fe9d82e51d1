"""The metrics of each step, to all trackers; the first of them is metrics.jsonl."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grmpipe.config.keys.secrets import environment_secrets, mask
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal, read_what_can_be, replace_journal
from grmpipe.observe.plain_json import finite
from grmpipe.trackers.tracker import SampleRow, Tracker
from grmpipe.types import Metrics

log = logging.getLogger(__name__)


class AllTrackers:
    """Passes results to every tracker. An error is counted in `failures`, and the tracker is called again at the next
    step.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        states: Mapping[str, Mapping[str, str]] | None = None,
        *,
        table_every: int = 1,
        table_rows: int = 8,
    ) -> None:
        """states:      what trackers kept at the checkpoint; those that this run doesn't have keep theirs.
        table_every: steps between tables, of `table_rows` rows at most; 0: none.
        """
        self._guard = Guard()
        self._trackers = dict(trackers)
        self._states = dict(states or {})
        self._table_every, self._table_rows = table_every, table_rows
        self._secrets = environment_secrets()

    @property
    def failures(self) -> Counter[str]:
        return self._guard.failures

    @property
    def causes(self) -> Mapping[str, str]:
        """The first failure of each, in words."""
        return self._guard.causes

    def open(self, name: str, opened: Callable[[], Tracker]) -> None:
        """Add a tracker; one that can't be opened is left out."""
        with self._guard.watch(name):
            self._trackers[name] = opened()

    def log(self, step: int, metrics: Metrics) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        if self._table_every and step % self._table_every == 0:
            shown = [self._masked(row) for row in rows[: self._table_rows]]
            self._each(lambda tracker: tracker.table(step, shown))

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        takers = [one for one in self._trackers.items() if type(one[1]).span is not Tracker.span]
        if takers:  # thousands a step, and most trackers take none
            shown = {key: mask(arg, self._secrets) if isinstance(arg, str) else arg for key, arg in args.items()}
            for owner, tracker in takers:
                with self._guard.watch(owner):
                    tracker.span(lane, name, start_s, end_s, shown)

    def alarm(self, text: str) -> None:
        shown = mask(text, self._secrets)
        self._each(lambda tracker: tracker.alarm(shown))

    def end(self, status: str, failure: str | None) -> None:
        shown = None if failure is None else mask(failure, self._secrets)
        self._each(lambda tracker: tracker.end(status, shown))

    def resume_states(self) -> dict[str, Mapping[str, str]]:
        """Name -> what a resume gives to the tracker again."""
        for name, tracker in self._trackers.items():
            with self._guard.watch(name):
                self._states[name] = json.loads(json.dumps(dict(tracker.resume_state())))
        return {name: state for name, state in self._states.items() if state}

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            with self._guard.watch(name):
                call(tracker)

    def _masked(self, row: SampleRow) -> SampleRow:
        question, answer, critique = (mask(text, self._secrets) for text in (row.question, row.answer, row.critique))
        return replace(row, question=question, answer=answer, critique=critique)


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
