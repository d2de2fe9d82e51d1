"""Trains a recorded run again: its batches in its order, with only the learner.

    rollouts.jsonl, judgements.jsonl, groups.jsonl -> batch of step n -> train: take .. take, step -> step n + 1

The same configuration gives bit-identical weights; another algorithm trains on the same data.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from grmpipe.judge.kinds.labels import find_rule
from grmpipe.observe.journal import read_journal, replace_journal
from grmpipe.observe.jsonl_sink import JsonlSink, is_up_to
from grmpipe.observe.recorder import GROUPS, TRAINED
from grmpipe.observe.summary import GroupsSummary, Status, Summary
from grmpipe.pipeline.interfaces import PipelineState, RolloutKey
from grmpipe.pipeline.learner_pace import with_pace
from grmpipe.pipeline.step_metrics import batch_metrics, truth_metrics
from grmpipe.pipeline.trained_rollouts import check_truth, describe_trained
from grmpipe.roles.machines import check_shared
from grmpipe.run.build.learning import find_learning, learner_spec
from grmpipe.run.build.start_cluster import start_cluster
from grmpipe.run.export import export
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.signals import ENDS_WITH_CHECKPOINT, stop_by_signals
from grmpipe.run_dir.checkpoint_writer import CheckpointWriter
from grmpipe.run_dir.identity import check_is_there, read_run_id
from grmpipe.run_dir.run_state import RunState
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.make_learner import make_learner
from grmpipe.types import JudgedGroup, Metrics
from grmpipe.validate.retraining import PreparedRetraining

log = logging.getLogger(__name__)


class RecordedRunTraining(Run[PreparedRetraining]):
    """Makes the steps of a recorded run with a learner."""

    def __init__(self, prepared: PreparedRetraining, context: RunContext) -> None:
        super().__init__(prepared, context)
        state = context.state
        self._recorded = prepared.recorded
        self._run_id = read_run_id(context.run_dir)
        self._writer = CheckpointWriter(context.checkpoints)
        self._cluster: Cluster | None = None
        self._steps_done = state.pipeline_state.version
        self._oldest = state.pipeline_state.max_staleness_trained
        self._busy_s = state.busy_s.get("learner", 0.0)
        self._interrupted = False

    async def run(self) -> Status:
        self._cluster = cluster = await start_cluster(self._config, self._prepared.placement)
        await check_shared(cluster, self._run_dir)
        learner = await self._start_learner(cluster)
        if (resumed := self._context.resumed) is not None:
            await learner.load(str(resumed / "learner"))
        void_after(self._steps_done, self._run_dir, self._observers.metrics)
        return await self._train(learner)

    async def after_failure(self, error: Exception) -> str:
        await self._writer.close(wait=True)
        return ""

    async def close(self) -> None:
        await self._writer.close(wait=False)
        if self._cluster is not None:
            await self._cluster.shutdown()

    async def _start_learner(self, cluster: Cluster) -> LearnerRanks:
        prepared = self._prepared
        learning = find_learning(self._config, prepared.policy, prepared.roles)
        # Its weights aren't sent anywhere.
        spec = learner_spec(learning, prepared.roles, self._config.seed, "object_store", self._run_dir)
        ranks = await cluster.start_members(learning.learner, functools.partial(make_learner, spec))
        learner = LearnerRanks(ranks, learning.train.parallel.cp)
        self._observers.note(f"{self._num_steps} steps of {self._recorded.rollouts}; files in {self._run_dir}")
        return learner

    @property
    def _num_steps(self) -> int:
        return min(self._config.train.num_steps, len(self._recorded.steps))

    async def _train(self, learner: LearnerRanks) -> Status:
        config = self._config
        trainer = BatchTrainer(
            learner,
            config.train,
            config.algorithm,
            config.rollout.max_new_tokens,
            seed=config.seed,
            mask_truncated=config.rollout.truncated == "mask",
            demonstrations=self._prepared.demonstrations,
        )
        if self._num_steps < config.train.num_steps:
            log.warning("%s holds %d steps: the replay ends there", self._recorded.rollouts, self._num_steps)
        with stop_by_signals(self._stop):
            while self._steps_done < self._num_steps and not self._interrupted:
                await self._step(trainer)
                self._writer.check()
                every = config.train.checkpoint_every
                if every and self._steps_done % every == 0 and self._steps_done < self._num_steps:
                    await self._checkpoint(learner)
            await self._checkpoint(learner)
            await self._writer.settle()
        if self._steps_done < self._num_steps:
            return "interrupted"
        await export(learner, self._run_dir / "policy", self._config.policy)
        return "completed"

    async def _step(self, trainer: BatchTrainer) -> None:
        began_s = time.monotonic()
        groups = self._recorded.batch(self._steps_done + 1)
        read_s = time.monotonic()
        for group, end in zip(groups, self._recorded.steps[self._steps_done], strict=True):
            await trainer.take(group)
            if end.early:
                await trainer.while_waiting()
        learnt = await trainer.step(groups)
        ended_s = time.monotonic()
        self._steps_done += 1
        self._busy_s += ended_s - read_s
        times = {"time/step_s": ended_s - began_s, "time/train_s": ended_s - read_s}
        self._record(groups, learnt.advantages, with_pace(learnt.metrics, ended_s - read_s) | times)

    def _record(self, groups: Sequence[JudgedGroup], advantages: Mapping[RolloutKey, float], metrics: Metrics) -> None:
        """Write the metrics of a step, how its groups ended, and what was trained."""
        step = self._steps_done
        mask_truncated = self._config.rollout.truncated == "mask"
        group_metrics = batch_metrics(groups, step - 1, self._config.algorithm, mask_truncated=mask_truncated)
        self._oldest = max(self._oldest, int(group_metrics["staleness/max"]))
        right = check_truth(groups, find_rule(self._config.truth))
        self._observers.recorder.record_training(describe_trained(step, groups, advantages, right, times={}))
        self._observers.trackers.log(step, group_metrics | truth_metrics(right) | metrics)
        for end in self._recorded.steps[step - 1]:
            self._observers.recorder.group_ended(dataclasses.replace(end, step=step))

    # -- checkpoints and ends ------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        log.info("asked to stop: %s", ENDS_WITH_CHECKPOINT)
        self._interrupted = True

    async def _checkpoint(self, learner: LearnerRanks) -> None:
        await self._writer.settle()
        check_is_there(self._run_dir, self._run_id)
        draft, in_background = self._context.checkpoints.draft(self._steps_done), self._config.train.async_checkpoints
        await learner.begin_save(str(draft / "learner"), in_background=in_background)
        state = RunState(
            pipeline_state=PipelineState(version=self._steps_done, max_staleness_trained=self._oldest),
            wall_s=self._context.wall_s,
            busy_s={"learner": self._busy_s},
            run_id=self._run_id,
            trackers=self._observers.trackers.resume_states(),
        )
        self._writer.publish_when_written(draft, state, {"learner": learner})
        if not in_background:
            await self._writer.settle()

    def results(self) -> Summary:
        trained = self._steps_done * self._recorded.groups_per_batch
        return Summary(
            steps=self._steps_done,
            versions={"policy": self._steps_done},
            busy_s={"learner": round(self._busy_s, 3)},
            groups=GroupsSummary(submitted=trained, trained=trained),
            max_staleness_trained=self._oldest,
        )


def void_after(steps_done: int, run_dir: Path, metrics: JsonlSink) -> None:
    """Void what a resume makes again: metrics, ends of groups and trained rollouts after the step of its checkpoint."""
    metrics.truncate_after(steps_done if steps_done else -1)
    for path in (run_dir / GROUPS, run_dir / TRAINED):
        if path.exists():
            replace_journal(path, [line for line in read_journal(path) if is_up_to(line.get("step"), steps_done)])
