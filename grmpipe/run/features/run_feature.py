"""A feature of a training run: what it does after each step, keeps between runs, and raises alarms about."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grmpipe.pipeline.counters import Counters
from grmpipe.pipeline.interfaces import StepReport
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.types import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """A step of the policy at its end.

    counts:  what was counted in the step.
    metrics: the step's, with those of the features before this one.
    """

    report: StepReport
    counts: Counters
    pipeline: Pipeline
    metrics: Metrics
    is_last: bool

    @property
    def step(self) -> int:
        return self.report.step


class RunFeature:
    """A feature overrides what it needs.

    name:       under which a checkpoint holds its state.
    new_alarms: not reported yet.
    stopped:    why it interrupted the pipeline, which then fails with this text after a checkpoint; empty: it didn't.
    """

    name = ""
    new_alarms: Sequence[str] = ()
    stopped = ""

    async def after_step(self, end: StepEnd) -> Metrics:
        """Further metrics of the step. The policy's engines have its weights."""
        return {}

    def alarms(self, *, is_last: bool) -> Iterable[str]:
        """New alarms, each once. Called after the metrics were written; may raise Unfit to end the run.

        is_last: no step follows.
        """
        new, self.new_alarms = self.new_alarms, ()
        return new

    def next_step(self) -> None:
        """The next step begins: evaluations and checkpoints after the one before are over."""

    async def finish(self) -> None:
        """The run did all its steps, and its last checkpoint is complete."""

    async def close(self) -> None:
        """End what the feature has started; called at any end of the run."""

    def state(self) -> Mapping[str, Any]:
        """What a resume needs, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; an empty one is the beginning."""
