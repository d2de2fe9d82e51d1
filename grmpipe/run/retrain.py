"""A recorded run, trained again: its batches in its order, by the learner alone. No engine, no judge, no waiting.

    rollouts.jsonl, judgements.jsonl, groups.jsonl -> batch of step n -> train: take .. take, step -> step n + 1

The same configuration comes to the same weights, to the bit; another algorithm to what it makes of the same data.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from grmpipe.judge.labels import rule_of
from grmpipe.observe.journal import read_journal, replace_journal
from grmpipe.observe.summary import GroupsSummary, Status, Summary, written
from grmpipe.pipeline.counters import batch_metrics, truth_metrics
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run.observers import Observers
from grmpipe.run.registry import CLUSTERS
from grmpipe.run.signals import asked_to_stop, ended_by_signals
from grmpipe.run.start import learner_spec
from grmpipe.run_dir.changes import changes_of
from grmpipe.run_dir.checkpoint_writer import CheckpointWriter
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.run_dir.run_state import RunState
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.train.learner.learner_spec import make_learner
from grmpipe.types import JudgedGroup, Metrics
from grmpipe.validate.retraining import PreparedRetraining
from grmpipe.validate.shared_folder import check_shared
from scheduler.processes.actors import Cluster
from scheduler.supervise import describe_failure

log = logging.getLogger(__name__)


async def retrain(prepared: PreparedRetraining, run_dir: Path, resumed: Path | None) -> Summary:
    """Run to an end of any kind. `resumed`: a checkpoint to go on from."""
    with ended_by_signals():
        return await retrain_to_an_end(prepared, run_dir, resumed)


async def retrain_to_an_end(prepared: PreparedRetraining, run_dir: Path, resumed: Path | None) -> Summary:
    checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=prepared.config.train.keep_checkpoints)
    state = checkpoints.load(resumed) if resumed else None
    (run_dir / "summary.json").unlink(missing_ok=True)  # of before a resume: untrue from now on
    observers = Observers.open(prepared.config, run_dir, state.wandb_run_id if state else None)
    run = RetrainRun(prepared, run_dir, observers, checkpoints, state)
    observers.tell_changes(changes := changes_of(run_dir))
    try:
        summary = await run.execute(resumed)
    finally:
        observers.close()
    summary = dataclasses.replace(summary, changes=changes, journal_failures=observers.journal_failures)
    summary = written(summary, run_dir / "summary.json")
    observers.show_end(run_dir, [], None)
    return summary


class RetrainRun:
    """From a prepared replay to a summary. What goes wrong within the run is not raised: the summary says it."""

    def __init__(
        self,
        prepared: PreparedRetraining,
        run_dir: Path,
        observers: Observers,
        checkpoints: Checkpoints,
        state: RunState | None,
    ) -> None:
        """`state`: where a resume goes on from."""
        self._config = prepared.config
        self._prepared = prepared
        self._recorded = prepared.recorded
        self._run_dir = run_dir
        self._observers = observers
        self._checkpoints = checkpoints
        self._writer = CheckpointWriter(checkpoints)
        self._steps_done = state.pipeline_state.version if state else 0
        self._oldest = state.pipeline_state.max_staleness_trained if state else 0
        self._busy_s = state.busy_s["learner"] if state else 0.0
        self._wall_before_s = state.wall_s if state else 0.0
        self._began_s = time.monotonic()
        self._interrupted = False

    async def execute(self, resumed: Path | None) -> Summary:
        """`resumed`: the checkpoint that holds the learner."""
        cluster: Cluster | None = None
        try:
            cluster = await CLUSTERS[self._config.cluster.kind](self._config, self._prepared.placement)
            await check_shared(cluster, self._run_dir)
            learner = await self._start_learner(cluster)
            if resumed is not None:
                await learner.load(str(resumed / "learner"))
            self._void_beyond_cut()
            return self._summary(await self._train(learner))
        except asyncio.CancelledError:
            return self._summary("interrupted")
        except Exception as error:
            log.exception("the replay failed", extra={"file_only": True})
            await self._writer.close(wait=True)
            return self._summary("failed", describe_failure(error))
        finally:
            await self._writer.close(wait=False)
            if cluster is not None:
                await cluster.shutdown()

    async def _start_learner(self, cluster: Cluster) -> LearnerGroup:
        prepared = self._prepared
        # Its weights go nowhere.
        spec = learner_spec(self._config, prepared.policy.path, prepared.roles, "object_store", self._run_dir)
        learner = LearnerGroup(await cluster.start_group("learner", functools.partial(make_learner, spec)))
        self._observers.note(f"{self._num_steps} steps of {self._recorded.rollouts}; files in {self._run_dir}")
        return learner

    @property
    def _num_steps(self) -> int:
        return min(self._config.train.num_steps, len(self._recorded.steps))

    async def _train(self, learner: LearnerGroup) -> Status:
        config = self._config
        trainer = BatchTrainer(learner, config.train, config.algorithm, config.rollout.max_new_tokens, seed=config.seed)
        if self._num_steps < config.train.num_steps:
            log.warning("%s holds %d steps: the replay ends there", self._recorded.rollouts, self._num_steps)
        with asked_to_stop(self._stop):
            while self._steps_done < self._num_steps and not self._interrupted:
                await self._step(trainer)
                self._writer.check()
                every = config.train.checkpoint_every
                if every and self._steps_done % every == 0 and self._steps_done < self._num_steps:
                    await self._checkpoint(learner)
        await self._checkpoint(learner)
        await self._writer.settled()
        if self._steps_done < self._num_steps:
            return "interrupted"
        await self._export(learner)
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
        self._record(groups, learnt | times)

    def _record(self, groups: Sequence[JudgedGroup], metrics: Metrics) -> None:
        """Everything that the step is told by, and how its groups ended."""
        step = self._steps_done
        told = batch_metrics(groups, step - 1, self._config.algorithm)
        self._oldest = max(self._oldest, int(told["staleness/max"]))
        told |= truth_metrics(groups, rule_of(self._config.judge))
        self._observers.tracker.log(step, told | metrics)
        for end in self._recorded.steps[step - 1]:
            self._observers.recorder.group_ended(dataclasses.replace(end, step=step))

    # -- cuts and ends -------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._observers.note("stopping after this step, with a checkpoint; a second signal stops at once")
        self._interrupted = True

    def _void_beyond_cut(self) -> None:
        done, groups = self._steps_done, self._run_dir / "groups.jsonl"
        self._observers.metrics.truncate_after(done if done else -1)
        if groups.exists():
            replace_journal(groups, [end for end in read_journal(groups) if end["step"] <= done])

    async def _checkpoint(self, learner: LearnerGroup) -> None:
        await self._writer.settled()
        draft, aside = self._checkpoints.draft(self._steps_done), self._config.train.async_checkpoints
        await learner.begin_save(str(draft / "learner"), aside=aside)
        state = RunState(
            pipeline_state=PipelineState(version=self._steps_done, max_staleness_trained=self._oldest),
            wall_s=self._wall_s,
            eval_initial={},
            totals={},
            busy_s={"learner": self._busy_s},
            wandb_run_id=self._observers.wandb.run_id,
        )
        self._writer.publish_when_written(draft, state, {"learner": learner})
        if not aside:
            await self._writer.settled()

    async def _export(self, learner: LearnerGroup) -> None:
        """As a Hugging Face directory, with the chat template that the rollouts were made under."""
        await learner.export(str(self._run_dir / "policy"))
        if template := self._config.policy.chat_template:
            shutil.copyfile(template, self._run_dir / "policy" / "chat_template.jinja")

    @property
    def _wall_s(self) -> float:
        return round(self._wall_before_s + time.monotonic() - self._began_s, 3)

    def _summary(self, status: Status, failure: str | None = None) -> Summary:
        trained = self._steps_done * self._recorded.groups_per_batch
        summary = Summary(
            status=status,
            steps=self._steps_done,
            versions={"policy": self._steps_done},
            wall_s=self._wall_s,
            busy_s={"learner": round(self._busy_s, 3)},
            groups=GroupsSummary(submitted=trained, trained=trained),
            max_staleness_trained=self._oldest,
            failure=failure,
        )
        try:
            return summary.with_objective(self._config.objective)
        except ValueError as error:
            log.info("%s", error)
            return summary
