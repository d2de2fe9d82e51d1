"""Models that judge as the policy was after some step (iterative self-rewarding, arXiv 2401.10020): the policy is
written to a folder after that step, and their engines read it there.
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
    """A model that judges, and takes over the policy's weights after the steps in `after`.

    first: the weights that its engines start with.
    """

    name: str
    after: tuple[int, ...]
    engines: Router
    sync: WeightSync
    first: StoredWeights

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
        """The number of updates up to this version of the policy, of all models together."""
        return sum(step <= version for grm in self._grms for step in grm.after)

    async def begin(self, version: int) -> None:
        """Bring all engines to the weights that belong to a version of the policy, before the first judgement. Raises
        ConfigError if the policy of an earlier step was removed.
        """
        for grm in self._grms:
            await self._push(grm, grm.step_at(version))

    async def after_step(self, end: StepEnd) -> Metrics:
        """The models' versions, after the updates that are due: no group is judged before and after one."""
        due = [grm for grm in self._grms if end.step in grm.after]
        if due:
            await self._write(end.step, due[0].first.probe_ids)
        for grm in due:
            await end.pipeline.change_judge(1, functools.partial(self._push, grm, end.step))
        return {f"{name}/version": float(step) for name, step in self.versions.items()}

    async def _push(self, grm: UpdatedGrm, step: int) -> SyncReport:
        weights = grm.first if step == 0 else self._written(grm, step)
        grm.sync.send_from(weights, weights.probe_ids)
        report = await push_to_living(grm.sync, grm.engines, step)
        self.versions[grm.name] = step
        return report

    async def _write(self, version: int, probe_ids: tuple[int, ...]) -> None:
        """Write the policy, with its log-probs of a probe. A folder is whole, or isn't there; one from before a resume
        is replaced.
        """
        whole, draft = self._folder / str(version), self._folder / f"{version}.draft"
        for folder in (whole, draft):
            shutil.rmtree(folder, ignore_errors=True)
        async with self._learner.held():
            await export(self._learner, draft, self._settings)
            logprobs = await self._learner.score(probe_ids)
        probe = {"token_ids": probe_ids, "logprobs": logprobs}
        (draft / PROBE).write_text(json.dumps(probe) + "\n", encoding="utf-8")
        draft.rename(whole)

    def _written(self, grm: UpdatedGrm, step: int) -> StoredWeights:
        folder = self._folder / str(step)
        try:
            probe = json.loads((folder / PROBE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"resume: {folder} is missing, the policy of step {step}, which judges as {grm.name}; restore it, or "
                "begin again in another run_dir"
            ) from None
        return StoredWeights(
            path=str(folder.absolute()),
            probe_ids=tuple(probe["token_ids"]),
            logprobs=tuple(probe["logprobs"]),
            config=grm.first.config,
        )
