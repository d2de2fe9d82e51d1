"""Settings of tracking, and the table of trackers. Imports no tracking library."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from grmpipe.config.keys.dotted_path import check_takes, find_at, is_dotted, unknown_value
from grmpipe.models.bounds import Bounded, at_least
from grmpipe.trackers.mlflow_tracker import MlflowConfig
from grmpipe.trackers.opentelemetry_tracker import OpenTelemetryConfig
from grmpipe.trackers.prometheus_tracker import PrometheusConfig
from grmpipe.trackers.swanlab_tracker import SwanlabConfig
from grmpipe.trackers.tensorboard_tracker import TensorboardConfig
from grmpipe.trackers.tracker import TrackedRun, Tracker, TrackerConfig
from grmpipe.trackers.trackio_tracker import TrackioConfig
from grmpipe.trackers.wandb_tracker import WandbConfig
from grmpipe.trackers.webhook_tracker import WebhookConfig


@dataclass(frozen=True)
class TrackingConfig(Bounded):
    """Where metrics and tables go. The files in `run_dir` are always written."""

    # Trackers that get every step: names of blocks below, or the dotted path of a class of your own (docs/tracking.md).
    trackers: list[str] = field(default_factory=lambda: ["wandb"])
    # [steps] Interval between tables of rollouts with their judgements in trackers; 0: none.
    table_every: int = at_least(0, 10, "0 (no tables) or more steps")
    console: bool = True  # Show progress: a line per step.
    json_logging: bool = False  # The console's lines as JSON objects, for collectors of logs; a step's has all metrics.
    # The table of trackers. A new one is a file in grmpipe/trackers/, a row here and a test.

    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    opentelemetry: OpenTelemetryConfig = field(default_factory=OpenTelemetryConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    webhook: WebhookConfig = field(default_factory=WebhookConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count in Counter(self.trackers).items():
            if count > 1:
                raise ValueError(f"trackers: {name} stands there {count} times; leave one")
            if is_dotted(name):
                check_takes(name, "trackers", ("run",))
            elif name not in self.shipped:
                raise unknown_value(name, "trackers", self.shipped)

    @property
    def shipped(self) -> dict[str, TrackerConfig]:
        """Name -> settings, of every row of the table."""
        return {name: row for name, row in vars(self).items() if isinstance(row, TrackerConfig)}

    @property
    def chosen(self) -> dict[str, TrackerConfig]:
        """Name -> settings, of the shipped trackers of this run."""
        return {name: row for name, row in self.shipped.items() if name in self.trackers}

    def find_missing(self) -> str:
        """The error for a tracker whose library isn't installed; empty if all are."""
        texts = {name: row.find_missing() for name, row in self.chosen.items()}
        return next(
            (f"tracking.trackers: {name} can't be used here; {text}" for name, text in texts.items() if text), ""
        )

    def open(self, name: str, run: TrackedRun) -> Tracker:
        """Open one of `trackers`. Raises whatever its library or the user's class raises."""
        if name in self.shipped:
            return self.shipped[name].open(run)
        return cast(Callable[[TrackedRun], Tracker], find_at(name, "tracking.trackers"))(run)
