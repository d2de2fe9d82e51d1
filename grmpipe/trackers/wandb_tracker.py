"""Metrics and tables to Weights & Biases. Never asks for a key and never fails a start."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from grmpipe.trackers.tracker import SampleRow, TrackedRun, Tracker, TrackerConfig
from grmpipe.types import Metrics

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

COLUMNS: tuple[str, ...] = ("step", *(spec.name for spec in fields(SampleRow)))
START_TIMEOUT_S = 20.0  # W&B's own is 90, which looks like a dead run
FINISH_TIMEOUT_S = 120.0
MODES = ("auto", "online", "offline")
Mode = Literal["online", "offline"]


@dataclass(frozen=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases. Its files are in `wandb/` of the run's directory."""

    library = "wandb"

    # Mode of W&B; auto: online if WANDB_API_KEY is set, otherwise offline. No mode asks for a key.
    mode: str = "auto"
    entity: str | None = None  # The user or team of W&B that has the project; null: the key's own.
    project: str = "grmpipe"  # W&B's project.
    group: str | None = None  # W&B shows the runs of a group together: the seeds of an experiment, for example.
    run_name: str | None = None  # Name of the run in W&B; null: that of its folder.
    tags: list[str] = field(default_factory=list)  # Tags of the run in W&B.

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"mode: unknown mode {self.mode!r}; known: {', '.join(MODES)}; for a run without W&B type tracking=none"
            )
        if not self.project:
            raise ValueError("project: is empty; give the W&B project's name, for example grmpipe")

    def open(self, run: TrackedRun) -> Tracker:
        return WandbTracker(self, run)

    def destination(self) -> str:
        online = len(modes_to_try(self.mode, os.environ)) > 1
        return "W&B online" if online else "W&B offline; set WANDB_API_KEY to go online"


class WandbTracker(Tracker):
    """One W&B run, which a resume continues. If it can't go online it runs offline (`wandb sync` sends the files
    later).
    """

    def __init__(self, config: WandbConfig, run: TrackedRun) -> None:
        self._run_id = run.state.get("run_id") or uuid.uuid4().hex[:8]
        self._failed = False
        import_wandb()
        modes = modes_to_try(config.mode, os.environ)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb")  # the run's processes start meanwhile
        self._starting = thread.submit(first_started, modes, config, run, self._run_id)

    def _run(self) -> wandb.Run:
        """The run, waited for. Raises RuntimeError if none could be started."""
        if (cause := self._starting.exception()) is not None:
            raise RuntimeError(f"W&B did not start: {cause!r}") from cause  # the cause itself would grow by each raise
        return self._starting.result()

    def log(self, step: int, metrics: Metrics) -> None:
        self._run().log({"step": step, **metrics})

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        import wandb

        data = [[step, *astuple(row)] for row in rows]
        self._run().log({"step": step, "rollouts": wandb.Table(columns=list(COLUMNS), data=data)})

    def alarm(self, text: str) -> None:
        """W&B sends it to whoever asked for alerts: by mail, or to a channel of Slack."""
        self._run().alert("alarm", text, level="WARN")

    def end(self, status: str, failure: str | None) -> None:
        self._failed = status == "failed"

    def resume_state(self) -> Mapping[str, str]:
        return {"run_id": self._run_id}

    def close(self) -> None:
        import wandb

        self._run().finish(exit_code=int(self._failed))
        wandb.teardown()  # waits for the last records: finish may return before they are in the file


def modes_to_try(mode: str, environ: Mapping[str, str]) -> tuple[Mode, ...]:
    """The modes to try, in this order, until one starts."""
    online = mode == "online" or (mode == "auto" and bool(environ.get("WANDB_API_KEY")))
    return ("online", "offline") if online else ("offline",)


def import_wandb() -> None:
    """Import W&B and what its `init` would import, in the thread that asks.

    Pydantic parses the source of W&B's models at their import, torch parses functions at its own. Two threads of one
    process may not parse at once: "AST constructor recursion depth mismatch" ends either (python/cpython#106905).
    """
    # W&B reads it at its import: no crash reports to W&B, no line about the key it found.
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    import wandb.sdk.launch.inputs.internal  # noqa: F401  # late: a run without W&B shouldn't pay for it


def first_started(modes: Sequence[Mode], config: WandbConfig, run: TrackedRun, run_id: str) -> wandb.Run:
    """Start a run in the first mode that works. Raises what the last one raises."""
    *others, last = modes
    for mode in others:
        try:
            return start(config, mode, run, run_id)
        except Exception as error:
            log.warning("wandb can't start %s, the run is tracked %s: %r", mode, last, error, exc_info=error)
    return start(config, last, run, run_id)


def start(config: WandbConfig, mode: Mode, run: TrackedRun, run_id: str) -> wandb.Run:
    import wandb

    run.run_dir.mkdir(parents=True, exist_ok=True)
    try:
        started = wandb.init(
            project=config.project,
            name=config.run_name or run.run_dir.resolve().name,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            id=run_id,
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
            settings=quiet_settings(mode),
        )
    except Exception:
        wandb.teardown(exit_code=1)  # otherwise the next attempt fails because the run's id is in use
        raise
    # W&B's own step restarts at 0 when a run resumes offline; ours continues.
    started.define_metric("step", hidden=True)
    started.define_metric("*", step_metric="step")
    return started


def quiet_settings(mode: Mode) -> wandb.Settings:
    """No questions, no console capture, no code, no git, no machine, no command line (it may hold a secret)."""
    import wandb

    return wandb.Settings(
        mode=mode,
        silent=True,
        console="off",
        login_timeout=START_TIMEOUT_S,
        init_timeout=START_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
    )
