"""Metrics and rollouts to a tracking server of MLflow."""

import importlib.util
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from grmpipe.trackers.tracker import SampleRow, TrackedRun, Tracker, TrackerConfig
from grmpipe.types import Metrics

SERVER = "MLFLOW_TRACKING_URI"
FORBIDDEN = re.compile(r"[^\w\-. /:]")  # in a metric's name


@dataclass(frozen=True)
class MlflowConfig(TrackerConfig):
    """MLflow, at the server that MLFLOW_TRACKING_URI names; its credentials are MLflow's own variables."""

    library = "mlflow"

    experiment: str = "grmpipe"  # MLflow's experiment; it is made if there is none.

    def open(self, run: TrackedRun) -> Tracker:
        return MlflowTracker(self, run)

    def find_missing(self) -> str:
        if not importlib.util.find_spec(self.library):
            return "type `pip install 'grmpipe[mlflow]'`"
        return "" if os.environ.get(SERVER) else f"set {SERVER} to your server, for example http://localhost:5000"


class MlflowTracker(Tracker):
    """One run of MLflow, which a resume continues. Metrics are sent by a thread of MLflow's."""

    def __init__(self, config: MlflowConfig, run: TrackedRun) -> None:
        # MLflow's own are 7 retries and 120 s: a server that is away would hold up the start for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        from mlflow.tracking import MlflowClient  # late: it may not be installed, and takes seconds

        self._client = MlflowClient()
        self._run_id = run.state.get("run_id") or self._begin(config, run)
        self._client.update_run(self._run_id, "RUNNING")
        self._state = "FINISHED"

    def _begin(self, config: MlflowConfig, run: TrackedRun) -> str:
        found = self._client.get_experiment_by_name(config.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(config.experiment)
        run_id = str(self._client.create_run(experiment, run_name=run.run_dir.name).info.run_id)
        self._client.log_dict(run_id, dict(run.config), "config.json")
        return run_id

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        finite = {FORBIDDEN.sub("_", name): value for name, value in metrics.items() if math.isfinite(value)}
        logged = [Metric(name, value, now_ms, step) for name, value in finite.items()]
        self._client.log_batch(self._run_id, metrics=logged, synchronous=False)

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._client.log_dict(self._run_id, {"rollouts": [asdict(row) for row in rows]}, f"rollouts/{step}.json")

    def end(self, status: str, failure: str | None) -> None:
        self._state = {"completed": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")

    def resume_state(self) -> Mapping[str, str]:
        return {"run_id": self._run_id}

    def close(self) -> None:
        import mlflow

        mlflow.flush_async_logging()
        self._client.set_terminated(self._run_id, self._state)
