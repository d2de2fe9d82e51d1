"""Models that judge or teach as the policy was after some step (iterative self-rewarding, arXiv 2401.10020), or as its
moving average: the weights are written to a folder after that step, and their engines read them there.
"""

import functools
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.run_config import ConfigError
from grmpipe.run.export import export
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.types import Metrics
from models.settings import ModelConfig
from scheduler.routing.router import Router
from scheduler.slots.engine_replacement import push_to_living
from scheduler.weights.stored_weights import StoredWeights
from scheduler.weights.weight_sync import SyncReport, WeightSync

FOLDER = "policy_versions"  # of a run's directory: <step>/, a Hugging Face directory with the probe's log-probs
PROBE = "probe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedGrm:
    """A model that judges or teaches, and takes over the policy's weights after the steps in `after`.

    first:  the weights that its engines start with.
    rate:   the policy's share of the weights after an update.
    judges: whether a judge asks it: then no group has verdicts from before and after an update.
    """

    name: str
    after: tuple[int, ...]
    engines: Router
    sync: WeightSync
    first: StoredWeights
    rate: float = 1.0
    judges: bool = True

    @property
    def averages(self) -> bool:
        return self.rate < 1

    def folder(self, step: int) -> str:
        """The name of its weights after the update of a step: the policy's own are shared by all models."""
        return f"{self.name}_{step}" if self.averages else str(step)

    def step_at(self, version: int) -> int:
        """The step whose policy it is when the policy has this version; 0: the weights that it started with."""
        return max((step for step in self.after if step <= version), default=0)


class PolicyUpdates(RunFeature):
    """All such models of a run. There may be none."""

    def __init__(self, grms: Sequence[UpdatedGrm], learner: LearnerRanks, settings: ModelConfig, run_dir: Path) -> None:
        """settings: of the policy."""
        self._grms = tuple(grms)
        self._learner, self._settings = learner, settings
        self._folder = run_dir / FOLDER
        self.versions = dict.fromkeys((grm.name for grm in self._grms), 0)  # name -> the step whose policy it is

    @property
    def syncs(self) -> dict[str, WeightSync]:
        """Name -> what brings its engines up to date."""
        return {grm.name: grm.sync for grm in self._grms}

    def count(self, version: int) -> int:
        """The number of updates up to this version of the policy, of all models that judge together."""
        return sum(step <= version for grm in self._grms if grm.judges for step in grm.after)

    async def begin(self, version: int) -> None:
        """Bring all engines to the weights that belong to a version of the policy, before the first judgement. Raises
        ConfigError if the policy of an earlier step was removed.
        """
        for grm in self._grms:
            await self._push(grm, grm.step_at(version))

    async def after_step(self, end: StepEnd) -> Metrics:
        """The models' versions, after the updates that are due: no group is judged before and after one."""
        due = [grm for grm in self._grms if end.step in grm.after]
        for grm in {grm.folder(end.step): grm for grm in due}.values():
            await self._write(grm, end.step)
        for grm in due:
            push = functools.partial(self._push, grm, end.step)
            await (end.pipeline.change_judge(1, push) if grm.judges else push())
            if grm.averages:
                self._remove_old(grm)
        return {f"{name}/version": float(step) for name, step in self.versions.items()}

    async def _push(self, grm: UpdatedGrm, step: int) -> SyncReport:
        weights = self._weights_of(grm, step)
        grm.sync.send_from(weights, weights.probe_ids)
        report = await push_to_living(grm.sync, grm.engines, step)
        self.versions[grm.name] = step
        return report

    async def _write(self, grm: UpdatedGrm, step: int) -> None:
        """Write the policy, or its average with what the model was, with the policy's log-probs of a probe. Those of an
        average are unknown. A folder is whole, or isn't there; one from before a resume is replaced.
        """
        whole = self._folder / grm.folder(step)
        draft, probe_ids = whole.with_suffix(".draft"), grm.first.probe_ids
        for folder in (whole, draft):
            shutil.rmtree(folder, ignore_errors=True)
        async with self._learner.held():
            await export(self._learner, draft, self._settings)
            logprobs = () if grm.averages else await self._learner.score(probe_ids)
        if grm.averages:
            await self._learner.average(str(draft), self._weights_of(grm, self.versions[grm.name]).path, grm.rate)
        probe = {"token_ids": probe_ids, "logprobs": logprobs}
        (draft / PROBE).write_text(json.dumps(probe) + "\n", encoding="utf-8")
        draft.rename(whole)

    def _remove_old(self, grm: UpdatedGrm) -> None:
        """Remove the averages that no checkpoint needs: one that is being written needs the last but one."""
        done = [step for step in grm.after if step <= self.versions[grm.name]]
        checkpoints = Checkpoints(directory=self._folder.parent / "checkpoints", keep=1)
        needed = {*done[-2:], *map(grm.step_at, checkpoints.list_steps())}
        for step in set(done) - needed:
            shutil.rmtree(self._folder / grm.folder(step), ignore_errors=True)

    def _weights_of(self, grm: UpdatedGrm, step: int) -> StoredWeights:
        """The model's weights after the update of a step; 0: those that it started with."""
        if step == 0:
            return grm.first
        folder = self._folder / grm.folder(step)
        try:
            probe = json.loads((folder / PROBE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"resume: {folder} is missing, the weights of {grm.name} after step {step}; restore it, or "
                "begin again in another run_dir"
            ) from None
        return StoredWeights(
            path=str(folder.absolute()),
            probe_ids=tuple(probe["token_ids"]),
            logprobs=tuple(probe["logprobs"]),
            config=grm.first.config,
        )
