"""metrics.jsonl: one JSON object a step, readable while the run goes on. Holds numbers only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from grmpipe.observe.journal import Journal, read_journal, replace_journal
from grmpipe.observe.plain_json import finite
from grmpipe.observe.sample_rows import SampleRow
from grmpipe.types import Metrics


class JsonlSink:
    """`{"step": n, "time": seconds since 1970, name: value, ...}`; what is no finite number becomes null."""

    name = "metrics.jsonl"

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._journal = Journal(path)
        self._now = now

    def log(self, step: int, metrics: Metrics) -> None:
        values = {name: finite(value) for name, value in metrics.items()}
        self._journal.append({"step": step, "time": round(self._now(), 3), **values})

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Nothing: rollouts.jsonl and judgements.jsonl hold them all."""

    def close(self) -> None:
        self._journal.close()

    def truncate_after(self, step: int) -> None:
        """Void what lies beyond a checkpoint's cut. Atomic; a torn last line goes too."""
        self.close()
        path = self._journal.path
        if path.exists():
            replace_journal(path, [record for record in read_journal(path) if record["step"] <= step])
