"""All GRMs that are trained next to the policy, as one: wraps the policy's parts by each, runs all flows."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from grmpipe.envs.play import Play
from grmpipe.pipeline.interfaces import PipelineState, Trainer
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.run.features.cotrain.cotraining import CoTraining
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.types import Metrics

T = TypeVar("T")


class CoTrainings(RunFeature):
    """The trained GRMs of a run, each with a flow, a learner and a version of its own. There may be none."""

    def __init__(self, each: Sequence[CoTraining] = ()) -> None:
        self._each = tuple(each)

    def __bool__(self) -> bool:
        return bool(self._each)

    @property
    def version(self) -> int:
        """The version of the judging: the optimizer steps of all of them."""
        return sum(self.versions.values())

    @property
    def versions(self) -> dict[str, int]:
        """Role -> completed optimizer steps."""
        return {one.role: one.version for one in self._each}

    @property
    def learner_busy_s(self) -> dict[str, float]:
        """Role of a learner -> seconds in its calls."""
        return {one.learner_role: one.learner_busy_s for one in self._each}

    def record(self, play: Play) -> Play:
        """The policy's episodes, whose ends become judging tasks of each GRM."""
        return functools.reduce(lambda played, one: one.record(played), self._each, play)

    def in_lockstep(self, trainer: Trainer) -> Trainer:
        """The policy's trainer, whose steps wait for the GRMs' steps that are due before them."""
        return functools.reduce(lambda paced, one: one.in_lockstep(paced), self._each, trainer)

    async def push(self) -> None:
        """Push the weights of every GRM to its engines, before the first step."""
        for one in self._each:
            await one.push(one.version)

    async def run_alongside(self, policy: Pipeline, work: Callable[[], Awaitable[T]]) -> T:
        """Run the flows of the GRMs until `work`, which runs the policy's, ends. All are then between two steps."""
        for one in self._each:
            work = functools.partial(one.run_alongside, policy, work)
        return await work()

    async def after_step(self, end: StepEnd) -> Metrics:
        return {name: value for one in self._each for name, value in one.after_policy_step(end.step).items()}

    async def begin_save(self, checkpoint: Path, *, in_background: bool) -> dict[str, PipelineState]:
        """Save the learners. Role -> the state of its flow, between two of its steps."""
        return {one.role: await one.begin_save(checkpoint, in_background=in_background) for one in self._each}
