"""Metrics and rollouts to TensorBoard's event files."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass

from grmpipe.trackers.tracker import SampleRow, TrackedRun, Tracker, TrackerConfig
from grmpipe.types import Metrics


@dataclass(frozen=True)
class TensorboardConfig(TrackerConfig):
    """TensorBoard. `tensorboard --logdir runs` shows all runs in a folder."""

    library = "tensorboard"

    def open(self, run: TrackedRun) -> Tracker:
        return TensorboardTracker(run)

    def find_missing(self) -> str:
        return "" if importlib.util.find_spec(self.library) else "type `pip install 'grmpipe[tensorboard]'`"


class TensorboardTracker(Tracker):
    """The event files in a run's directory. A resume hides the steps after its checkpoint, which it makes again."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # late: it imports tensorboard, which may not be installed

        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.first_step)
        self._writer.add_text("config", as_code(json.dumps(run.config, indent=1)), run.first_step)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed process loses nothing of the steps before

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        for row in rows:
            text = f"{row.question}\n\n{row.answer}\n\n{row.critique}\n\nscore {row.score}, truth {row.truth}"
            self._writer.add_text(f"rollouts/{row.group_id}_{row.sibling}", as_code(text), step)

    def close(self) -> None:
        self._writer.close()


def as_code(text: str) -> str:
    """Markdown that shows a text as it is: TensorBoard renders texts."""
    return "\n".join(f"    {line}" for line in text.splitlines())
