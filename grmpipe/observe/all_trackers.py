"""All trackers of a run as one: each gets every step, and none can fail one."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from grmpipe.config.keys.redact import environment_secrets, mask
from grmpipe.observe.guard import Guard
from grmpipe.trackers.tracker import SampleRow, Tracker
from grmpipe.types import Metrics


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
