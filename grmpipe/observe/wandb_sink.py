"""Metrics and tables to Weights & Biases. Never asks for a key, never sends a secret, never fails a start."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grmpipe.config.redact import environment_secrets, mask, redact
from grmpipe.config.tracking import TrackingConfig
from grmpipe.observe.guard import Guard
from grmpipe.observe.sample_rows import SampleRow
from grmpipe.types import Metrics

if TYPE_CHECKING:
    import wandb

COLUMNS: tuple[str, ...] = ("step", *(field.name for field in fields(SampleRow)))
START_TIMEOUT_S = 20.0  # W&B's own is 90: too long to look at a run that may be dead
FINISH_TIMEOUT_S = 120.0
Mode = Literal["online", "offline", "disabled"]


class WandbSink:
    """One W&B run, whatever happens to the process: store `run_id` in checkpoints and give it back.

    Its files lie in `run_dir`/wandb. What can't go online goes offline (`wandb sync` sends it later).
    """

    name = "wandb"

    def __init__(
        self, config: TrackingConfig, run_dir: Path, run_config: Mapping[str, object], run_id: str | None = None
    ) -> None:
        self.run_id = run_id or uuid.uuid4().hex[:8]
        self._config = config
        self._secrets = environment_secrets()
        self._run: wandb.Run | None = None
        guard = Guard()
        for mode in modes_to_try(config.wandb_mode, os.environ):
            if self._run is None:
                with guard.watch(f"wandb ({mode})"):
                    self._run = start(config, mode, run_dir, redact(run_config), self.run_id)

    def log(self, step: int, metrics: Metrics) -> None:
        if self._run is not None:
            self._run.log({"step": step, **metrics})

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Rollouts with judgements, every `table_every` steps."""
        every = self._config.table_every
        if self._run is None or not every or step % every:
            return
        import wandb

        data = [self._cells(step, row) for row in rows[: self._config.table_rows]]
        self._run.log({"step": step, "rollouts": wandb.Table(columns=list(COLUMNS), data=data)})

    def close(self) -> None:
        if self._run is None:
            return
        import wandb

        run, self._run = self._run, None
        run.finish()
        wandb.teardown()  # finish may return before the last records are in the file; this waits for them

    def _cells(self, step: int, row: SampleRow) -> list[object]:
        values = (getattr(row, column) for column in COLUMNS[1:])
        return [step, *(mask(value, self._secrets) if isinstance(value, str) else value for value in values)]


def modes_to_try(wandb_mode: str, environ: Mapping[str, str]) -> tuple[Mode, ...]:
    """In this order, until one starts."""
    if wandb_mode == "disabled":
        return ()
    online = wandb_mode == "online" or (wandb_mode == "auto" and bool(environ.get("WANDB_API_KEY")))
    return ("online", "offline") if online else ("offline",)


def start(
    config: TrackingConfig, mode: Mode, run_dir: Path, run_config: Mapping[str, object], run_id: str
) -> wandb.Run:
    """Offline this takes half a second, import included. `run_config` must be free of secrets."""
    # Read before any settings of ours: no crash reports to W&B, no line about whose key it found.
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    import wandb  # late: a run with W&B disabled shouldn't pay for it

    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=config.project,
            name=config.run_name,
            tags=config.tags,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=dict(run_config),
            settings=quiet_settings(mode),
        )
    except Exception:
        wandb.teardown(exit_code=1)  # or the next attempt is told that the run's id is in use
        raise
    # W&B's own step restarts at 0 when a run resumes offline; ours goes on.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


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
