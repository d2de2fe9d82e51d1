"""Stops a run whose journals take more of the disk than `journals.max_gb`."""

from pathlib import Path

from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.types import Metrics


class JournalLimit(RunFeature):
    """Measures the journals after each step, and stops the run before the next one if they are too large."""

    def __init__(self, run_dir: Path, max_gb: float | None) -> None:
        """max_gb: None: no limit."""
        self._run_dir = run_dir
        self._max_gb = max_gb

    async def after_step(self, end: StepEnd) -> Metrics:
        if self._max_gb is not None and not end.is_last and (size_gb := measure_gb(self._run_dir)) > self._max_gb:
            self.stopped = (
                f"the journals in {self._run_dir} take {size_gb:.3g} GB, more than journals.max_gb={self._max_gb:g}; "
                f"the run stopped after step {end.step}, with a checkpoint: make room, then type resume=auto with a "
                "larger journals.max_gb (or null), maybe with journals.compact=true"
            )
            end.pipeline.interrupt()
        return {}


def measure_gb(run_dir: Path) -> float:
    """The size of all journals in a run's directory."""
    return sum(path.stat().st_size for path in run_dir.glob("*.jsonl")) / 1e9
