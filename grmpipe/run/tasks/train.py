"""task=train: a policy learns from a judge. Start or resume, evaluate, run the pipeline, evaluate, export."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grmpipe.config.run_config import ConfigError
from grmpipe.judge.composition.composed_judge import get_bounds, get_members, with_own_bounds
from grmpipe.judge.monitor.preflight import NUM_PROMPTS, preflight_judgements, try_prompt
from grmpipe.judge.purpose import set_purpose
from grmpipe.judge.teaching import Teacher
from grmpipe.models.types import EngineDenied, EngineRefused, Message, RequestContext, make_scoring_params
from grmpipe.observe.recorder import GROUPS
from grmpipe.observe.summary import Status, Summary
from grmpipe.pipeline.consumer import Interrupted
from grmpipe.pipeline.interfaces import FlowConfig, PipelineState, RecoveredGroup, StepReport
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.step_metrics import step_metrics
from grmpipe.pipeline.trained_rollouts import check_truth, describe_trained
from grmpipe.run.build.compose_pipeline import make_components
from grmpipe.run.build.run_features import RunFeatures, make_cotrainings, make_features
from grmpipe.run.build.start import Running, start
from grmpipe.run.errors import RunFailed
from grmpipe.run.failed_batch import save_failed_batch
from grmpipe.run.features.cotrain.cotrainings import CoTrainings
from grmpipe.run.features.run_feature import StepEnd
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.run_watcher import StepControls
from grmpipe.run.signals import ENDS_WITH_CHECKPOINT, stop_by_signals
from grmpipe.run.step_progress import StepProgress
from grmpipe.run.tasks.stats import RunStats
from grmpipe.run_dir.checkpoint_writer import CheckpointWriter
from grmpipe.run_dir.identity import check_is_there, read_run_id
from grmpipe.run_dir.recovery import find_kept, void_group_ends, void_steps_after
from grmpipe.run_dir.run_state import RunState
from grmpipe.scheduler.gc_tuning import infrequent_gc
from grmpipe.scheduler.run_together import run_until
from grmpipe.trackers.tracker import SampleRow
from grmpipe.types import Judge, JudgedGroup, Metrics
from grmpipe.validate.prepare import Prepared

log = logging.getLogger(__name__)


class TrainingRun(Run[Prepared]):
    """A policy that learns from a judge: held-out evaluations, the flow between them, checkpoints, the export."""

    def __init__(self, prepared: Prepared, context: RunContext) -> None:
        super().__init__(prepared, context)
        self._state = context.state
        self._run_id = read_run_id(context.run_dir)
        self._writer = CheckpointWriter(context.checkpoints)
        self._stats = RunStats(prepared.config, context.state)
        self._running: Running | None = None
        self._pipeline: Pipeline | None = None
        self._features: RunFeatures | None = None
        self._alarms = list(self._state.alarms)

    @property
    def rows(self) -> Sequence[SampleRow]:
        return self._features.periodic_eval.rows if self._features is not None else ()

    async def run(self) -> Status:
        self._observers.note(f"starting {', '.join(self._config.roles)} ({self._config.cluster.kind})")
        # A machine that was lost may come back, or another in its place.
        wait_s = self._config.slots.health.start_deadline_s if self._context.is_restart else 0.0
        self._running = running = await start(self._prepared, self._observers, self._run_dir, wait_s)
        if (resumed := self._context.resumed) is not None:
            with self._observers.progress.show_while(f"starting: loads {resumed.name}"):
                for model in running.trained:
                    await model.load(resumed)
        self._observers.note(f"ready after {self.since_start_s:.0f} s; files in {self._run_dir}")
        self._stats.watch(running)
        return await run_until(self._train(running), **running.background())

    @property
    def restartable_step(self) -> int | None:
        if self._pipeline is None or self._features is None:  # it starts: what dies then would die again
            return None
        return None if self._features.periodic_eval.interrupted else self._pipeline.version

    async def after_failure(self, error: Exception) -> str:
        await self._writer.close(wait=True)
        if not isinstance(error, ArithmeticError) or self._pipeline is None:
            return ""
        return self._save_batch(self._pipeline.open_batch)

    def _save_batch(self, batch: Sequence[JudgedGroup]) -> str:
        return save_failed_batch(batch, self._run_dir / "failed_batch.jsonl")

    async def close(self) -> None:
        await self._writer.close(wait=False)
        for feature in self._features.each if self._features is not None else ():
            await feature.close()
        if self._running is not None:
            await self._running.close()

    async def _train(self, running: Running) -> Status:
        """Make all steps, between two held-out evaluations."""
        pipeline_state, kept = self._restore()
        cotrainings = make_cotrainings(self._prepared, running, self._state, kept, self._observers, self._run_dir)
        self._stats.cotrainings = cotrainings
        components = make_components(self._prepared, running, self._observers, cotrainings)
        features = make_features(self._prepared, running, components, cotrainings, self._observers, self._run_dir)
        self._features = features
        for feature in features.each:
            feature.restore(self._state.features.get(feature.name, {}))
        progress = self._observers.progress
        with set_purpose("preflight"), progress.show_while("starting: the judge's first verdicts"):
            await try_judge(self._prepared, running.judge, is_new=self._context.resumed is None)
            await try_teachers(self._prepared, running.teachers)
        with progress.show_while("starting: the engines get the learner's weights"):
            await components.push_weights(pipeline_state.version)
            await cotrainings.push()
            await running.policy_updates.begin(pipeline_state.version)
        policy_judges = self._config.judging.by_policy
        judging_version = cotrainings.version + running.policy_updates.count(pipeline_state.version)
        judging_version += pipeline_state.version if policy_judges else 0
        pipeline_state = replace(pipeline_state, judge_version=judging_version)

        async def after_step(report: StepReport) -> None:
            with progress.show_while(f"after step {report.step}"):
                await self._after_step(report, running, pipeline, features)
            step_progress.next_step(report.stalls.steps_s)

        config = self._config
        numbers = FlowConfig.of(
            config.train, config.rollout, config.algorithm, config.judging.tasks_at_once, config.seed, config.env
        )
        whole = config.rewards.varies_by_group()
        numbers = replace(numbers, policy_judges=policy_judges, keeps_whole_groups=whole)
        self._pipeline = pipeline = Pipeline(components, numbers, after_step, pipeline_state, kept, self._save_batch)
        step_progress = StepProgress(pipeline, config.train.num_steps)
        running.maintenance.stops(pipeline.clock)
        pipeline.counters.restore(self._state.totals, self._state.open_counts)
        for work in kept.values():
            pipeline.counters.add_recovered(work.uncounted)
        get_bounds(running.judge).go_on(pipeline.counters.total_so_far().cascades)
        periodic_eval, version = features.periodic_eval, pipeline_state.version
        if not periodic_eval.initial:
            await periodic_eval.first(version, lambda: features.judge_monitor.first(version, periodic_eval.seen))
            self._report_alarms(features)
        return await self._run_pipeline(running, pipeline, features, cotrainings, step_progress)

    async def _run_pipeline(
        self,
        running: Running,
        pipeline: Pipeline,
        features: RunFeatures,
        cotrainings: CoTrainings,
        step_progress: StepProgress,
    ) -> Status:
        """Run to the last step, or to the step in which a signal came; both end with a checkpoint."""
        periodic_eval = features.periodic_eval

        async def flow() -> None:
            with self._observers.progress.show_while(step_progress.describe):
                await pipeline.run()
            await periodic_eval.last(pipeline.version)
            self._report_alarms(features)
            if periodic_eval.interrupted and not periodic_eval.final:
                raise Interrupted

        interrupted = False
        with stop_by_signals(lambda: self._stop(pipeline)):  # the checkpoint too: a signal must not end its writing
            try:
                with infrequent_gc():
                    await cotrainings.run_alongside(pipeline, flow)
            except Interrupted:
                interrupted = True
                await running.policy.learner.discard()
                if running.critic is not None:
                    await running.critic.discard()
            await self._checkpoint(running, pipeline, features)
            await self._writer.settle()
        if interrupted:
            if why := next((feature.stopped for feature in features.each if feature.stopped), ""):
                raise RunFailed(why)
            return "interrupted"
        for feature in features.each:
            await feature.finish()
        for model in running.trained:
            await model.export(self._run_dir)
        self._observers.begun.end()
        return "completed"

    async def _after_step(
        self, report: StepReport, running: Running, pipeline: Pipeline, features: RunFeatures
    ) -> None:
        self._writer.check()
        is_last = report.step == self._config.train.num_steps
        self._stats.learner_busy_s += report.learner_busy_s
        counts = pipeline.counters.close_step()
        right = check_truth(report.groups, self._prepared.is_right)
        trained = describe_trained(report.step, report.groups, report.advantages, right, report.times)
        self._observers.recorder.record_training(trained)
        mask_truncated = self._config.rollout.truncated == "mask"
        metrics = step_metrics(
            report, counts, pipeline.ledger, right, self._config.algorithm, mask_truncated=mask_truncated
        )
        for feature in features.each:
            end = StepEnd(report=report, counts=counts, pipeline=pipeline, metrics=metrics, is_last=is_last)
            metrics = metrics | await feature.after_step(end)
        self._observers.trackers.log(report.step, metrics)
        self._observers.trackers.table(report.step, features.periodic_eval.rows)
        self._report_alarms(features, is_last=is_last)
        every = self._config.train.checkpoint_every
        if every and report.step % every == 0 and not is_last:
            await self._checkpoint(running, pipeline, features)
        one_at_a_time = asyncio.Lock()

        async def evaluate() -> Metrics:
            async with one_at_a_time:
                return await features.periodic_eval.evaluate_all(report.step)

        async def checkpoint() -> Path:
            async with one_at_a_time:
                return await self._complete_checkpoint(running, pipeline, features)

        with self._observers.progress.show_while(""):  # who watches may print
            controls = StepControls(evaluate=evaluate, checkpoint=checkpoint)
            await self._context.watcher.after_step(report.step, metrics, controls)
            async with one_at_a_time:  # the next step begins after all that was asked for
                pass
        for feature in features.each:
            feature.next_step()

    def _report_alarms(self, features: RunFeatures, *, is_last: bool = False) -> None:
        """Report new alarms to the summary, the log and the console. Raises Unfit if one ends the run."""
        for alarm in (alarm for feature in features.each for alarm in feature.alarms(is_last=is_last)):
            self._alarms.append(alarm)
            log.info("alarm: %s", alarm)
            self._observers.alarm(alarm)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _restore(self) -> tuple[PipelineState, dict[int, RecoveredGroup]]:
        """The state to continue from: a checkpoint, or the beginning; with what the journals have after it."""
        pipeline_state, run_id, marks = self._state.pipeline_state, self._run_id, self._state.journal_marks
        is_resumed, counted = self._context.resumed is not None, self._state.counted_marks
        kept = find_kept(self._run_dir, pipeline_state, self._prepared.prompts, run_id, marks, counted)
        void_group_ends(self._run_dir, pipeline_state, run_id, marks.get(GROUPS))
        void_steps_after(self._run_dir, pipeline_state.version, marks, run_id)
        self._observers.evaluations.go_on(marks)
        self._observers.recorder.go_on(marks, [work.group_id for work in kept.values()])
        kept = (begun := self._observers.begun).restore(pipeline_state, kept)
        self._observers.metrics.truncate_after(pipeline_state.version if is_resumed else -1)
        if is_resumed or kept:
            rollouts = sum(len(work.rollouts) for work in kept.values())
            verdicts = sum(len(work.reports) for work in kept.values())
            message = (
                f"resumed at step {pipeline_state.version}: {rollouts} rollouts kept, {verdicts} of them with verdicts"
            )
            message += f"; {len(begun)} more go on after their last turn" if len(begun) else ""
            log.info("%s", message)
            self._observers.note(message)
        return pipeline_state, kept

    async def _checkpoint(self, running: Running, pipeline: Pipeline, features: RunFeatures) -> None:
        """Begin a checkpoint; with train.async_checkpoints=false it is complete when this returns, otherwise soon."""
        await self._writer.settle()
        check_is_there(self._run_dir, self._run_id)
        draft, in_background = self._context.checkpoints.draft(pipeline.version), self._config.train.async_checkpoints
        state = RunState(
            pipeline_state=pipeline.state(),
            # Taken at the same moment as the pipeline's state:
            journal_marks=self._observers.recorder.marks() | self._observers.evaluations.marks,
            counted_marks=self._observers.recorder.ends(),
            totals=pipeline.counters.total.to_dict(),
            open_counts=pipeline.counters.step.to_dict(),
            grm_pipeline_states=await self._stats.cotrainings.begin_save(draft, in_background=in_background),
            wall_s=self.wall_s,
            features=features.states,
            busy_s=self._stats.busy_s(pipeline),
            alarms=tuple(self._alarms),
            restarts=self._state.restarts,
            run_id=self._run_id,
            trackers=self._observers.trackers.resume_states(),
        )
        begun = self._stats.cotrainings.versions  # by their own flows
        for model in running.trained:
            if model.name not in begun:
                await model.begin_save(draft, in_background=in_background)
        ranks = {model.learner_role: model.trained_ranks for model in running.trained}
        self._writer.publish_when_written(draft, state, ranks)
        if not in_background:
            await self._writer.settle()

    async def _complete_checkpoint(self, running: Running, pipeline: Pipeline, features: RunFeatures) -> Path:
        """Returns the checkpoint's directory once it is complete."""
        await self._checkpoint(running, pipeline, features)
        await self._writer.settle()
        latest = self._context.checkpoints.latest()
        assert latest is not None, "it was just published"
        return latest

    # -- ends --------------------------------------------------------------------------------------------------------

    def _stop(self, pipeline: Pipeline) -> None:
        log.info("asked to stop: %s", ENDS_WITH_CHECKPOINT)
        pipeline.interrupt()
        if self._features is not None:
            self._features.periodic_eval.interrupt()

    def results(self) -> Summary:
        states, final = self._state.features, {}
        if self._features is not None:
            states, final = self._features.states, self._features.periodic_eval.final
        return self._stats.results(self._pipeline, states, final, tuple(self._alarms))


async def try_judge(prepared: Prepared, judge: Judge, *, is_new: bool) -> None:
    """Raises ConfigError for a judge whose endpoint serves nothing, and at the start of a run for one that gives no
    verdict that can be read; ValueError if nothing answers then.
    """
    config, prompts = prepared.config, prepared.prompts
    first = [prompts.at(prompt_index) for prompt_index in range(min(NUM_PROMPTS, len(prompts)))]
    judge, members = with_own_bounds(judge), get_members(judge)
    asking = {**config.judging.generative, **config.judging.scalar}
    outside = {name: one for name, one in asking.items() if one.model in config.judging.remote_roles}
    try:
        if is_new:
            tried = {**config.judging.generative, **outside}
            if problem := await preflight_judgements(judge, members, tried, first):
                raise ConfigError(problem)
        else:
            for name in outside:
                await try_prompt(members.get(name, judge), first[0])
    except EngineDenied as error:
        raise ConfigError(str(error)) from error


async def try_teachers(prepared: Prepared, teachers: Mapping[str, Teacher]) -> None:
    """Raises ConfigError for a teacher whose endpoint serves nothing, or no scores."""
    for name, teacher in teachers.items():
        role = prepared.roles.served[name]
        if role.engine.endpoint is None:
            continue
        token_ids = prepared.policy.renderer.render((Message(role="user", content="1 + 1 = ?"),))
        params = make_scoring_params(len(token_ids) - 1, teacher.top_k)
        context = RequestContext(request_id=f"dry@{name}", group_id="dry", role=name)
        try:
            await teacher.engine.generate(token_ids, params, context)
        except EngineDenied as error:
            raise ConfigError(str(error)) from error
        except EngineRefused as error:
            raise ConfigError(f"{role.key}.path: {error}") from error
