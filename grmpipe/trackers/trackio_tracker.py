"""Metrics and rollouts to Trackio: a database of this machine, a Space or a server."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from grmpipe.trackers.tracker import SampleRow, TrackedRun, Tracker, TrackerConfig
from grmpipe.types import Metrics


@dataclass(frozen=True)
class TrackioConfig(TrackerConfig):
    """Trackio, in files of TRACKIO_DIR, or at the TRACKIO_SPACE_ID or TRACKIO_SERVER_URL. `trackio show` shows them."""

    library = "trackio"

    project: str = "grmpipe"  # Trackio's project.

    def open(self, run: TrackedRun) -> Tracker:
        return TrackioTracker(self.project, run)

    def find_missing(self) -> str:
        return "" if importlib.util.find_spec(self.library) else "type `pip install 'grmpipe[trackio]'`"


class TrackioTracker(Tracker):
    """One run of Trackio, which a resume continues: a step that it makes again is there twice. A thread of Trackio's
    writes.
    """

    def __init__(self, project: str, run: TrackedRun) -> None:
        import trackio  # late: it may not be installed

        name = run.state.get("name")
        self._run = trackio.init(
            project,
            name or run.name,
            config=dict(run.config),
            resume="allow" if name else "never",
            embed=False,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        # Not trackio.log: it finds the run by the context, and each task has its own.
        self._run.log(dict(metrics), step)

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        import trackio

        columns = [asdict(row) for row in rows]
        names = list(columns[0]) if columns else []
        table = trackio.Table(columns=names, data=[list(row.values()) for row in columns])
        self._run.log({"rollouts": table}, step)

    def alarm(self, text: str) -> None:
        self._run.alert("alarm", text)

    def resume_state(self) -> Mapping[str, str]:
        return {"name": self._run.name}

    def close(self) -> None:
        self._run.finish()
