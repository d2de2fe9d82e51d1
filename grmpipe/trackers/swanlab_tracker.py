"""Metrics and rollouts to SwanLab. Never asks for a key."""

import importlib.util
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from grmpipe.trackers.tracker import SampleRow, TrackedRun, Tracker, TrackerConfig
from grmpipe.types import Metrics


@dataclass(frozen=True)
class SwanlabConfig(TrackerConfig):
    """SwanLab: online with SWANLAB_API_KEY, offline without (`swanlab sync` sends the files later). Its files are in
    `swanlog/` of the run's directory.
    """

    library = "swanlab"

    workspace: str | None = None  # The user or team of SwanLab that has the project; null: the key's own.
    project: str = "grmpipe"  # SwanLab's project.

    def open(self, run: TrackedRun) -> Tracker:
        return SwanlabTracker(self, run)

    def find_missing(self) -> str:
        return "" if importlib.util.find_spec(self.library) else "type `pip install 'grmpipe[swanlab]'`"

    def destination(self) -> str:
        return "SwanLab online" if is_online() else "SwanLab offline; set SWANLAB_API_KEY to go online"


class SwanlabTracker(Tracker):
    """One experiment of SwanLab, which a resume continues."""

    def __init__(self, config: SwanlabConfig, run: TrackedRun) -> None:
        import swanlab  # late: it may not be installed

        self._run_id = run.state.get("run_id") or uuid.uuid4().hex[:12]
        self._state = "success"
        self._run = swanlab.init(
            workspace=config.workspace,
            project=config.project,
            name=run.name,
            id=self._run_id,
            resume="allow",
            mode="online" if is_online() else "offline",
            log_dir=str(run.run_dir / "swanlog"),
            config=dict(run.config),
            # No questions, no console, nothing of the machine: a command line may hold a secret.
            settings=swanlab.Settings(
                interactive=False,
                terminal={"proxy_type": "none"},
                probe=dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False),
            ),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        text = "\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows)
        self._run.log_text(key="rollouts", data=text, step=step)

    def end(self, status: str, failure: str | None) -> None:
        self._state = {"completed": "success", "failed": "crashed"}.get(status, "aborted")

    def resume_state(self) -> Mapping[str, str]:
        return {"run_id": self._run_id}

    def close(self) -> None:
        self._run.finish(state=self._state)


def is_online() -> bool:
    return bool(os.environ.get("SWANLAB_API_KEY"))
