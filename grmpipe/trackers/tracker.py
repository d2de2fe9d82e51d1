"""What a tracker of a run does, and what it is given. Imports no tracking library, nor the configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from grmpipe.types import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One rollout with its judgements, for people. If judging failed there is no score, and the critique says why.

    answer: the whole episode, in the judge's fences: lines of the policy begin with "> ", those of the environment with
            "| ".
    """

    group_id: str
    sibling: int
    question: str
    answer: str
    critique: str
    score: float | None
    truth: float | None  # 1 right, 0 wrong, by a rule that sees the reference; None without such a rule


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that a tracker is opened for.

    config:     the whole configuration, without secrets.
    state:      the tracker's `resume_state` at the checkpoint that a resume continues from; empty for a new run.
    first_step: what an earlier process logged of this step and later ones is void.
    """

    run_dir: Path
    config: Mapping[str, object]
    state: Mapping[str, str]
    first_step: int = 0

    @property
    def name(self) -> str:
        """The experiment and the folder: many folders are named by their time."""
        experiment = self.config.get("experiment_name")
        return f"{experiment}/{self.run_dir.name}" if experiment else self.run_dir.name


class Tracker:
    """A tracker overrides what it needs. An exception of a method stops neither the step nor the other trackers."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step."""

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Take rollouts, every `tracking.table_every` steps. Their texts are free of secrets."""

    def span(self, lane: str, name: str, start_s: float, end_s: float, args: Mapping[str, str | int | float]) -> None:
        """Take a span of the timeline: what an engine, the learner or a stage, the lane, did in seconds of
        time.monotonic.
        """

    def alarm(self, text: str) -> None:
        """Take an alarm of the run, in a sentence or two, free of secrets."""

    def end(self, status: str, failure: str | None) -> None:
        """Take how the run ended, before `close`: completed, failed or interrupted, and why it failed. A run that
        begins again at its last checkpoint has not ended.
        """

    def resume_state(self) -> Mapping[str, str]:
        """What a resume needs to continue the same run. Saved with each checkpoint."""
        return {}

    def close(self) -> None:
        """Write what is still open. Called at any end of the run."""


class TrackerConfig:
    """The base of a shipped tracker's settings.

    library: the package that it writes with; empty: it needs none.
    """

    library: ClassVar[str] = ""

    def open(self, run: TrackedRun) -> Tracker:
        raise NotImplementedError

    def find_missing(self) -> str:
        """What to install for it; empty if it can be opened here."""
        return ""

    def destination(self) -> str:
        """Where results go, in words, as far as the environment decides it."""
        return ""
