"""Thins the journals of a run as `journals.keep` says, and stops a run whose journals exceed `journals.max_gb`."""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import msgspec

from grmpipe.config.journals import ALL, JournalsConfig
from grmpipe.envs.process_group import wrap_command
from grmpipe.models.import_path import list_import_paths
from grmpipe.observe.recorder import Recorder
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.run_dir import thinning
from grmpipe.run_dir.thinning import DRAFT, ThinningJob, plan_thinning
from grmpipe.types import Metrics

LEAST_BYTES = 64_000_000  # that may be thinned, of a journal, before it is rewritten
LOOK_EVERY_S = 10.0
log = logging.getLogger(__name__)


class JournalSize(RunFeature):
    """Looks at the journals after each step. They are thinned while the run goes on, in a process of its own; a run
    stops at once, also within a step, if they are too large even so.
    """

    def __init__(self, run_dir: Path, config: JournalsConfig, seed: int, recorder: Recorder) -> None:
        self._run_dir = run_dir
        self._config = config
        self._seed = seed
        self._recorder = recorder
        self._keep = config.keep
        self._thinning: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        for draft in run_dir.glob(f"*{DRAFT}"):  # of a killed process
            draft.unlink(missing_ok=True)

    async def after_step(self, end: StepEnd) -> Metrics:
        self._begin(LEAST_BYTES)
        if self._watching is not None:
            self._watching.cancel()
        if self._config.max_gb is not None and not end.is_last:
            await self._stop_if_too_large(end.pipeline, f"after step {end.step}")
            self._watching = asyncio.create_task(self._watch(end), name="journals.max_gb")
        return {}

    async def _watch(self, end: StepEnd) -> None:
        """Look within the next step too: a step of long episodes writes much."""
        while not self.stopped:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._stop_if_too_large(end.pipeline, f"within step {end.step + 1}")

    async def _stop_if_too_large(self, pipeline: Pipeline, when: str) -> None:
        max_gb = self._config.max_gb
        if max_gb is None or measure_gb(self._run_dir) <= max_gb:
            return
        await self.finish()
        if (size_gb := measure_gb(self._run_dir)) > max_gb:
            self.stopped = (
                f"the journals in {self._run_dir} take {size_gb:.3g} GB, more than journals.max_gb={max_gb:g}; the run "
                f"stopped {when}, with a checkpoint: make room, then type resume=auto with a larger journals.max_gb "
                "(or null), maybe with journals.compact=true or journals.keep=text"
            )
            pipeline.interrupt()

    async def finish(self) -> None:
        """Thin all that can be."""
        for least_bytes in (LEAST_BYTES, 0):  # what is being thinned, then the rest
            self._begin(least_bytes)
            if self._thinning is not None:
                await asyncio.wait([self._thinning])

    async def close(self) -> None:
        tasks = [task for task in (self._watching, self._thinning) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, least_bytes: int) -> None:
        """Begin to thin, if enough came together and nothing is being thinned."""
        is_thinning = self._thinning is not None and not self._thinning.done()
        if self._keep == ALL or is_thinning:
            return
        job = plan_thinning(self._run_dir, self._config, self._seed, least_bytes)
        if job is not None:
            self._thinning = asyncio.create_task(self._thin(job), name="journals.keep")

    async def _thin(self, job: ThinningJob) -> None:
        try:
            self._recorder.adopt(await run_thinning(job))
            log.info("journals.keep: thinned; the journals take %.3g GB", measure_gb(self._run_dir))
        except (OSError, msgspec.MsgspecError) as error:
            self._keep = ALL
            log.warning("journals.keep: the journals stay whole from now on: they can't be thinned (%s)", error)
        finally:
            for draft in self._run_dir.glob(f"*{DRAFT}"):
                draft.unlink(missing_ok=True)


async def run_thinning(job: ThinningJob) -> dict[Path, int]:
    """The drafts, and how many bytes of its journal each has. Raises OSError."""
    command = [sys.executable, "-m", thinning.__name__, msgspec.json.encode(job).decode()]
    process = await asyncio.create_subprocess_exec(
        *wrap_command(command), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(list_import_paths())},
    )  # fmt: skip
    try:
        answer, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
    if process.returncode:
        raise OSError(said.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {process.returncode}")
    return {Path(draft): copied for draft, copied in msgspec.json.decode(answer, type=dict[str, int]).items()}


def measure_gb(run_dir: Path) -> float:
    """The size of all journals in a run's directory, those of co-trained judges too."""
    return sum(path.stat().st_size for path in (*run_dir.glob("*.jsonl"), *run_dir.glob("cotrain/*/*.jsonl"))) / 1e9
