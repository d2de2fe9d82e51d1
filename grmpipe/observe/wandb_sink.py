"""Metrics and tables to Weights & Biases. Never asks for a key, never sends a secret, never fails a start."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
START_TIMEOUT_S = 20.0  # W&B's own is 90, which looks like a dead run
FINISH_TIMEOUT_S = 120.0
Mode = Literal["online", "offline", "disabled"]


class WandbSink:
    """A sink to one W&B run, which a resume continues: store `run_id` in checkpoints and pass it again.

    Its files are in `run_dir`/wandb. If it can't go online it runs offline (`wandb sync` sends the files later).
    """

    name = "wandb"

    def __init__(
        self, config: TrackingConfig, run_dir: Path, run_config: Mapping[str, object], run_id: str | None = None
    ) -> None:
        self.run_id = run_id or uuid.uuid4().hex[:8]
        self._config = config
        self._secrets = environment_secrets()
        self._closed = False
        modes = modes_to_try(config.wandb_mode, os.environ)
        if modes and not import_wandb():
            modes = ()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb")  # the run's processes start meanwhile
        self._starting = thread.submit(first_started, modes, config, run_dir, redact(run_config), self.run_id)

    @property
    def _run(self) -> wandb.Run | None:
        """The run, waited for; None where none could be started, and after the end."""
        return None if self._closed else self._starting.result()

    def log(self, step: int, metrics: Metrics) -> None:
        if (run := self._run) is not None:
            run.log({"step": step, **metrics})

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Send rollouts with judgements, every `table_every` steps."""
        every = self._config.table_every
        if not every or step % every or (run := self._run) is None:
            return
        import wandb

        data = [self._cells(step, row) for row in rows[: self._config.table_rows]]
        run.log({"step": step, "rollouts": wandb.Table(columns=list(COLUMNS), data=data)})

    def close(self) -> None:
        run, self._closed = self._run, True
        if run is None:
            return
        import wandb

        run.finish()
        wandb.teardown()  # waits for the last records: finish may return before they are in the file

    def _cells(self, step: int, row: SampleRow) -> list[object]:
        values = (getattr(row, column) for column in COLUMNS[1:])
        return [step, *(mask(value, self._secrets) if isinstance(value, str) else value for value in values)]


def modes_to_try(wandb_mode: str, environ: Mapping[str, str]) -> tuple[Mode, ...]:
    """The modes to try, in this order, until one starts."""
    if wandb_mode == "disabled":
        return ()
    online = wandb_mode == "online" or (wandb_mode == "auto" and bool(environ.get("WANDB_API_KEY")))
    return ("online", "offline") if online else ("offline",)


def import_wandb() -> bool:
    """Import W&B and what its `init` would import, in the thread that asks; whether that worked.

    Pydantic parses the source of W&B's models at their import, torch parses functions at its own. Two threads of one
    process may not parse at once: "AST constructor recursion depth mismatch" ends either (python/cpython#106905).
    """
    # W&B reads it at its import: no crash reports to W&B, no line about the key it found.
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    guard = Guard()
    with guard.watch("wandb"):
        import wandb.sdk.launch.inputs.internal  # noqa: F401  # late: a run without W&B shouldn't pay for it
    return not guard.failures


def first_started(
    modes: Sequence[Mode], config: TrackingConfig, run_dir: Path, run_config: Mapping[str, object], run_id: str
) -> wandb.Run | None:
    """Start a run in the first mode that works; None where none does."""
    guard = Guard()
    for mode in modes:
        with guard.watch(f"wandb ({mode})"):
            return start(config, mode, run_dir, run_config, run_id)
    return None


def start(
    config: TrackingConfig, mode: Mode, run_dir: Path, run_config: Mapping[str, object], run_id: str
) -> wandb.Run:
    """Start a W&B run. `run_config` must be free of secrets."""
    import wandb

    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=config.project,
            name=config.run_name or run_dir.resolve().name,
            tags=config.tags,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=dict(run_config),
            settings=quiet_settings(mode),
        )
    except Exception:
        wandb.teardown(exit_code=1)  # otherwise the next attempt fails because the run's id is in use
        raise
    # W&B's own step restarts at 0 when a run resumes offline; ours continues.
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
