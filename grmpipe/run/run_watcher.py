"""Who watches a run from outside and acts between its steps. Called in the run's event loop."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.observe.recorder import JudgedSibling
from grmpipe.types import Metrics

# Takes a row of task=score, and gives the verdicts on its responses. Raises ValueError for one that can't be judged.
AskJudge = Callable[[dict[str, object]], Awaitable[Sequence[JudgedSibling]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepControls:
    """What a training run does on request between two steps, one after the other.

    evaluate:   on all held-out problems. Returns metrics by their names in the summary; none without problems.
    checkpoint: returns its directory once it is complete.
    """

    evaluate: Callable[[], Awaitable[Metrics]]
    checkpoint: Callable[[], Awaitable[Path]]


class RunWatcher:
    """Watches nothing. One that watches overrides what it needs. asks: whether it asks a judge in `serve`."""

    asks = False

    def note_opened(self, run_dir: Path) -> None:
        """The run's directory is claimed, or holds a run that is complete."""

    async def serve(self, judge: AskJudge) -> None:
        """A judge runs, and ends when this returns."""

    async def after_step(self, step: int, metrics: Metrics, controls: StepControls) -> None:
        """A training step is over and logged. The next one begins when this returns."""
