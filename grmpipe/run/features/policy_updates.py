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
from grmpipe.models.settings import ModelConfig
from grmpipe.run.export import export
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.slots.engine_replacement import push_to_living
from grmpipe.scheduler.weights.stored_weights import StoredWeights
from grmpipe.scheduler.weights.weight_push import SyncReport
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.types import Metrics

FOLDER = "policy_versions"  # in a run's directory: <step>/, a Hugging Face directory with the probe's log-probs
PROBE = "probe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedModel:
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

    def __init__(
        self, models: Sequence[UpdatedModel], learner: LearnerRanks, settings: ModelConfig, run_dir: Path
    ) -> None:
        """settings: of the policy."""
        self._models = tuple(models)
        self._learner, self._settings = learner, settings
        self._folder = run_dir / FOLDER
        self.versions = dict.fromkeys((model.name for model in self._models), 0)  # name -> the step whose policy it is

    @property
    def syncs(self) -> dict[str, WeightSync]:
        """Name -> what brings its engines up to date."""
        return {model.name: model.sync for model in self._models}

    def count(self, version: int) -> int:
        """The number of updates up to this version of the policy, of all models that judge together."""
        return sum(step <= version for model in self._models if model.judges for step in model.after)

    async def begin(self, version: int) -> None:
        """Bring all engines to the weights that belong to a version of the policy, before the first judgement. Raises
        ConfigError if the policy of an earlier step was removed.
        """
        for model in self._models:
            await self._push(model, model.step_at(version))

    async def after_step(self, end: StepEnd) -> Metrics:
        """The models' versions, after the updates that are due: no group is judged before and after one."""
        due = [model for model in self._models if end.step in model.after]
        for model in {model.folder(end.step): model for model in due}.values():
            await self._write(model, end.step)
        for model in due:
            push = functools.partial(self._push, model, end.step)
            await (end.pipeline.change_judge(1, push) if model.judges else push())
            if model.averages:
                self._remove_old(model)
        return {f"{name}/version": float(step) for name, step in self.versions.items()}

    async def _push(self, model: UpdatedModel, step: int) -> SyncReport:
        weights = self._weights_of(model, step)
        model.sync.send_from(weights, weights.probe_ids)
        report = await push_to_living(model.sync, model.engines, step)
        self.versions[model.name] = step
        return report

    async def _write(self, model: UpdatedModel, step: int) -> None:
        """Write the policy, or its average with what the model was, with the policy's log-probs of a probe. Those of an
        average are unknown. A folder is whole, or isn't there; one from before a resume is replaced.
        """
        whole = self._folder / model.folder(step)
        draft, probe_ids = whole.with_suffix(".draft"), model.first.probe_ids
        for folder in (whole, draft):
            shutil.rmtree(folder, ignore_errors=True)
        async with self._learner.held():
            await export(self._learner, draft, self._settings)
            logprobs = () if model.averages else await self._learner.score(probe_ids)
        if model.averages:
            await self._learner.average(str(draft), self._weights_of(model, self.versions[model.name]).path, model.rate)
        probe = {"token_ids": probe_ids, "logprobs": logprobs}
        (draft / PROBE).write_text(json.dumps(probe) + "\n", encoding="utf-8")
        draft.rename(whole)

    def _remove_old(self, model: UpdatedModel) -> None:
        """Remove the averages that no checkpoint needs: one that is being written needs the last but one."""
        done = [step for step in model.after if step <= self.versions[model.name]]
        checkpoints = Checkpoints(directory=self._folder.parent / "checkpoints", keep=1)
        needed = {*done[-2:], *map(model.step_at, checkpoints.list_steps())}
        for step in set(done) - needed:
            shutil.rmtree(self._folder / model.folder(step), ignore_errors=True)

    def _weights_of(self, model: UpdatedModel, step: int) -> StoredWeights:
        """The model's weights after the update of a step; 0: those that it started with."""
        if step == 0:
            return model.first
        folder = self._folder / model.folder(step)
        try:
            probe = json.loads((folder / PROBE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"resume: {folder} is missing, the weights of {model.name} after step {step}; restore it, or "
                "begin again in another run_dir"
            ) from None
        return StoredWeights(
            path=str(folder.absolute()),
            probe_ids=tuple(probe["token_ids"]),
            logprobs=tuple(probe["logprobs"]),
            config=model.first.config,
        )
