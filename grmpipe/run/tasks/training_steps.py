"""The steps of a training: the flow, what follows each step, checkpoints, and where a resume continues; the line on a
step in progress, and the batch of one whose numbers were not finite, as a file to replay it.
"""

import asyncio
import base64
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from grmpipe.judge.composition.composed_judge import get_bounds
from grmpipe.models.types import BudgetSpent
from grmpipe.observe.progress import counts_text, join_shown, left_at_pace, left_text, speed_text
from grmpipe.observe.recorder import GROUPS
from grmpipe.pipeline.consumer import Interrupted
from grmpipe.pipeline.interfaces import (
    FlowConfig,
    PipelineComponents,
    PipelineState,
    Prompts,
    RecoveredGroup,
    StepReport,
)
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.step_metrics import check_truth, describe_trained, step_metrics
from grmpipe.run.build.run_features import RunFeatures
from grmpipe.run.build.start import Running
from grmpipe.run.errors import RunFailed
from grmpipe.run.features.cotrain.cotraining import CoTrainings
from grmpipe.run.features.run_feature import StepEnd
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_context import RunContext
from grmpipe.run.run_watcher import StepControls
from grmpipe.run.signals import ENDS_WITH_CHECKPOINT
from grmpipe.run.tasks.stats import RunStats
from grmpipe.run_dir.checkpoints import CheckpointWriter
from grmpipe.run_dir.identity import check_is_there, read_run_id
from grmpipe.run_dir.recovery import find_kept, void_group_ends, void_steps_after
from grmpipe.run_dir.run_state import RunState
from grmpipe.scheduler.gc_tuning import infrequent_gc
from grmpipe.types import JudgedGroup, Metrics

log = logging.getLogger(__name__)

Kept = Mapping[int, RecoveredGroup]  # prompt index -> the finished work of its group


class TrainingSteps:
    """The flow of the policy, from a state to its last step, and what the run does at each step's end."""

    def __init__(
        self,
        prepared: Prepared,
        context: RunContext,
        running: Running,
        components: PipelineComponents,
        features: RunFeatures,
        cotrainings: CoTrainings,
        stats: RunStats,
        writer: CheckpointWriter,
        state: PipelineState,
        kept: Kept,
    ) -> None:
        """state, kept: where the flow begins. The engines have the weights of that state."""
        config = prepared.config
        self._prepared, self._context, self._config = prepared, context, config
        self._run_dir, self._observers = context.run_dir, context.observers
        self._running, self._features, self._cotrainings = running, features, cotrainings
        self._stats, self._writer = stats, writer
        self._trainer = components.trainer
        self._run_id = read_run_id(context.run_dir)
        self.alarms = list(context.state.alarms)
        numbers = replace(
            FlowConfig.of(
                config.train, config.rollout, config.algorithm, config.judging.tasks_at_once, config.seed, config.env
            ),
            policy_judges=config.judging.by_policy,
            keeps_whole_groups=config.rewards.varies_by_group(),
        )
        # Verdicts are of the models that judge, and of rubrics, which may change in the run: of all versions together.
        judging_version = cotrainings.version + running.policy_updates.count(state.version)
        judging_version += sum(rubric.number for rubric in prepared.rubrics.values())
        judging_version += state.version if config.judging.by_policy else 0
        begin = replace(state, judge_version=judging_version)
        self.pipeline = pipeline = Pipeline(components, numbers, self._after_step, begin, kept, self._save_batch)
        self._progress = StepProgress(pipeline, config.train.num_steps)
        running.maintenance.stops(pipeline.clock)
        pipeline.counters.restore(context.state.totals, context.state.open_counts)
        for work in kept.values():
            pipeline.counters.add_recovered(work.uncounted)
        get_bounds(running.judge).go_on(pipeline.counters.total_so_far().cascades)

    @property
    def restartable_step(self) -> int | None:
        return None if self._features.periodic_eval.interrupted else self.pipeline.version

    async def evaluate_first(self) -> None:
        """The evaluation before the first step, unless one is in the state that a resume continues from."""
        periodic_eval, version = self._features.periodic_eval, self.pipeline.version
        if not periodic_eval.initial:
            await periodic_eval.first(version, lambda: self._features.judge_monitor.first(version, periodic_eval.seen))
            self._report_alarms()

    async def run_flow(self) -> bool:
        """Run to the last step and evaluate, or to the step in which a signal came: whether it got to the end. Raises
        RunFailed if a feature stopped it.
        """
        periodic_eval = self._features.periodic_eval

        async def flow() -> None:
            with self._observers.progress.show_while(self._progress.describe):
                await self.pipeline.run()
            await periodic_eval.last(self.pipeline.version)
            self._report_alarms()
            if periodic_eval.interrupted and not periodic_eval.final:
                raise Interrupted

        try:
            with infrequent_gc():
                await self._cotrainings.run_alongside(self.pipeline, flow)
        except Interrupted:
            await self._trainer.discard()
            return False
        return True

    def stop(self) -> None:
        log.info("asked to stop: %s", ENDS_WITH_CHECKPOINT)
        self.pipeline.interrupt()
        self._features.periodic_eval.interrupt()

    def raise_if_stopped(self) -> None:
        """Raises BudgetSpent if judging paused, RunFailed if a feature interrupted the flow."""
        if self.pipeline.why_paused:
            raise BudgetSpent(self.pipeline.why_paused)
        if why := next((feature.stopped for feature in self._features.each if feature.stopped), ""):
            raise RunFailed(why)

    # -- the end of a step ---------------------------------------------------------------------------------------------

    async def _after_step(self, report: StepReport) -> None:
        with self._observers.progress.show_while(f"after step {report.step}"):
            await self._end_step(report)
        self._progress.next_step(report.stalls.steps_s)

    async def _end_step(self, report: StepReport) -> None:
        """Count and record the step, let each feature look at it, log its metrics; a checkpoint if one is due."""
        self._writer.check()
        config, pipeline, observers = self._config, self.pipeline, self._observers
        is_last = report.step == config.train.num_steps
        self._stats.learner_busy_s += report.learner_busy_s
        counts = pipeline.counters.close_step()
        right = check_truth(report.groups, self._prepared.is_right)
        observers.recorder.record_training(
            describe_trained(report.step, report.groups, report.advantages, right, report.times)
        )
        mask_truncated = config.rollout.truncated == "mask"
        metrics = step_metrics(report, counts, pipeline.ledger, right, config.algorithm, mask_truncated=mask_truncated)
        for feature in self._features.each:
            end = StepEnd(report=report, counts=counts, pipeline=pipeline, metrics=metrics, is_last=is_last)
            try:
                metrics = metrics | await feature.after_step(end)
            except BudgetSpent as error:  # the step is done: it ends like one in which a signal came
                feature.stopped = str(error)
                pipeline.interrupt()
        observers.trackers.log(report.step, metrics)
        observers.trackers.table(report.step, self._features.periodic_eval.rows)
        self._report_alarms(is_last=is_last)
        every = config.train.checkpoint_every
        if every and report.step % every == 0 and not is_last:
            await self.checkpoint()
        await self._let_watcher_act(report.step, metrics)
        for feature in self._features.each:
            feature.next_step()

    async def _let_watcher_act(self, step: int, metrics: Metrics) -> None:
        """Who watches may evaluate and write checkpoints, one at a time, before the next step begins."""
        one_at_a_time = asyncio.Lock()

        async def evaluate() -> Metrics:
            async with one_at_a_time:
                return await self._features.periodic_eval.evaluate_all(step)

        async def checkpoint() -> Path:
            async with one_at_a_time:
                await self.checkpoint()
                await self._writer.settle()
                latest = self._context.checkpoints.latest()
                assert latest is not None, "it was just published"
                return latest

        with self._observers.progress.show_while(""):  # who watches may print
            await self._context.watcher.after_step(
                step, metrics, StepControls(evaluate=evaluate, checkpoint=checkpoint)
            )
            async with one_at_a_time:  # the next step begins after all that was asked for
                pass

    def _report_alarms(self, *, is_last: bool = False) -> None:
        """Report new alarms to the summary, the log and the console. Raises Unfit if one ends the run."""
        for alarm in (alarm for feature in self._features.each for alarm in feature.alarms(is_last=is_last)):
            self.alarms.append(alarm)
            log.info("alarm: %s", alarm)
            self._observers.trackers.alarm(alarm)

    # -- what is kept --------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        """Begin a checkpoint; with train.async_checkpoints=false it is complete when this returns, otherwise soon."""
        await self._writer.settle()
        pipeline, observers = self.pipeline, self._observers
        check_is_there(self._run_dir, self._run_id)
        draft, in_background = self._context.checkpoints.draft(pipeline.version), self._config.train.async_checkpoints
        state = RunState(
            pipeline_state=pipeline.state(),
            # Taken at the same moment as the pipeline's state:
            journal_marks=observers.recorder.marks() | observers.evaluations.marks,
            counted_marks=observers.recorder.ends(),
            totals=pipeline.counters.total.to_dict(),
            open_counts=pipeline.counters.step.to_dict(),
            grm_pipeline_states=await self._cotrainings.begin_save(draft, in_background=in_background),
            wall_s=self._context.wall_s,
            features=self._features.states,
            busy_s=self._stats.busy_s(pipeline),
            alarms=tuple(self.alarms),
            restarts=self._context.state.restarts,
            run_id=self._run_id,
            trackers=observers.trackers.resume_states(),
        )
        trained = self._running.trained
        for model in trained:
            if model.name not in self._cotrainings.versions:  # the others began between two steps of their own flows
                await model.begin_save(draft, in_background=in_background)
        self._writer.publish_when_written(draft, state, {model.learner_role: model.trained_ranks for model in trained})
        if not in_background:
            await self._writer.settle()

    def save_open_batch(self) -> str:
        """Write the batch whose numbers were not finite. Returns a line for the user."""
        return self._save_batch(self.pipeline.open_batch)

    def _save_batch(self, batch: Sequence[JudgedGroup]) -> str:
        return save_failed_batch(batch, self._run_dir / "failed_batch.jsonl")


def restore_flow(context: RunContext, prompts: Prompts) -> tuple[PipelineState, Kept]:
    """The state to continue from, a checkpoint's or the beginning, with the work that the journals have after it."""
    state, run_dir, observers = context.state, context.run_dir, context.observers
    flow, marks, run_id = state.pipeline_state, state.journal_marks, read_run_id(run_dir)
    is_resumed = context.resumed is not None
    kept = find_kept(run_dir, flow, prompts, run_id, marks, state.counted_marks)
    void_group_ends(run_dir, flow, run_id, marks.get(GROUPS))
    void_steps_after(run_dir, flow.version, marks, run_id)
    observers.evaluations.go_on(marks)
    observers.recorder.go_on(marks, [work.group_id for work in kept.values()])
    kept = observers.begun.restore(flow, kept)
    observers.metrics.truncate_after(flow.version if is_resumed else -1)
    if is_resumed or kept:
        rollouts = sum(len(work.rollouts) for work in kept.values())
        verdicts = sum(len(work.reports) for work in kept.values())
        message = f"resumed at step {flow.version}: {rollouts} rollouts kept, {verdicts} of them with verdicts"
        message += f"; {len(observers.begun)} more go on after their last turn" if len(observers.begun) else ""
        log.info("%s", message)
        observers.note(message)
    return flow, kept


def to_plain(value: bytes | np.ndarray) -> object:
    """A value that JSON doesn't know, as the journal has it."""
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value.tolist()


def save_failed_batch(batch: Sequence[JudgedGroup], path: Path) -> str:
    """Append the batch of a step with non-finite numbers, to replay it. Returns a line for the user."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(group), default=to_plain) + "\n" for group in batch)
    except OSError as refused:  # a full disk must not hide the first cause
        return f"\nthe batch could not be written to {path}: {refused.strerror}"
    return f"\nthe batch is in {path}, one group per line"


LEARNER = {
    "work": "the learner trains",
    "weights": "weights are pushed",
    "policy": "the learner waits for rollouts",
    "judge": "the learner waits for verdicts",
}


class StepProgress:
    """What a step has, its speed, and the time left by the mean of the steps before it."""

    def __init__(self, pipeline: Pipeline, num_steps: int) -> None:
        self._pipeline = pipeline
        self._num_steps = num_steps
        self._num_timed, self._steps_s = 0, 0.0
        self._begin()

    def next_step(self, last_s: float) -> None:
        """A step begins, now. last_s: how long the one before took."""
        self._num_timed += 1
        self._steps_s += last_s
        self._begin()

    def describe(self, _: float) -> str:
        """The line now."""
        took_s, batch = time.monotonic() - self._began_s, self._pipeline.batch_progress
        policy, judge = self._tokens()
        step_s = self._steps_s / self._num_timed if self._num_timed else None
        if step_s is not None and step_s > took_s:
            left_s: float | None = step_s - took_s
        else:
            left_s = left_at_pace(batch.verdicts, batch.siblings, took_s)
        later = self._num_steps - self._pipeline.version - 1
        return join_shown(
            f"step {self._pipeline.version + 1:>{len(str(self._num_steps))}}/{self._num_steps}",
            counts_text("rollouts", batch.rollouts, batch.siblings),
            counts_text("verdicts", batch.verdicts, batch.siblings),
            speed_text("policy", policy - self._tokens_before[0], took_s),
            speed_text("judge", judge - self._tokens_before[1], took_s),
            left_text(left_s),
            left_text(None if step_s is None or later < 1 else (left_s or 0.0) + later * step_s, "run "),
            LEARNER.get(batch.learner or "", ""),
        )

    def _begin(self) -> None:
        self._began_s = time.monotonic()
        self._tokens_before = self._tokens()  # what ends during an evaluation between two steps is none of this step's

    def _tokens(self) -> tuple[int, int]:
        """Tokens of the policy and of judges since the last step was counted, without those from before a resume."""
        counts = self._pipeline.counters.step
        return (
            counts.policy_tokens - counts.kept_policy_tokens,
            counts.judging.judge_tokens - counts.judging.kept_tokens,
        )
