"""task=train: a policy learns from a judge. Start or resume, evaluate, run the pipeline, evaluate, export."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from grmpipe.config.judging import POLICY
from grmpipe.config.reward import max_errors, varies_by_group
from grmpipe.config.run_config import ConfigError
from grmpipe.judge.composition.cascade_counts import CascadeAlarm
from grmpipe.judge.composition.composed_judge import bounds_of, members_of, skill_of, with_own_bounds
from grmpipe.judge.monitor.preflight import NUM_PROMPTS, preflight_judgements, tried
from grmpipe.judge.monitor.reward_hacking import RewardHackingDetector
from grmpipe.judge.purpose import asking_for
from grmpipe.observe.recorder import GROUPS
from grmpipe.observe.sample_rows import SampleRow
from grmpipe.observe.summary import Status, Summary
from grmpipe.pipeline.counters import step_metrics
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, PipelineState, RecoveredGroup, StepReport
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.service_health import JudgeFitness
from grmpipe.pipeline.training import Interrupted
from grmpipe.run.components import make_evaluator, make_parts
from grmpipe.run.cotrain.cotraining import CoTraining
from grmpipe.run.cotrain.cotrainings import CoTrainings
from grmpipe.run.export import export
from grmpipe.run.failing_judges import FailingJudges
from grmpipe.run.judge_monitoring import JudgeMonitor, MonitoredJudge
from grmpipe.run.periodic_eval import ANCHORS, PeriodicEval
from grmpipe.run.session import Run, Session
from grmpipe.run.signals import asked_to_stop
from grmpipe.run.start import RunComponents, start
from grmpipe.run.stats import RunStats
from grmpipe.run_dir.checkpoint_writer import CheckpointWriter
from grmpipe.run_dir.identity import check_is_there, run_id_of
from grmpipe.run_dir.run_state import NOTHING_COUNTED, RunState, find_kept, void_group_ends
from grmpipe.types import Metrics
from grmpipe.validate.prepare import Prepared
from models.types import EngineDenied
from scheduler.gc_tuning import infrequent_gc
from scheduler.supervise import run_until

log = logging.getLogger(__name__)


class TrainingRun(Run[Prepared]):
    """A policy that learns from a judge: held-out evaluations, the flow between them, checkpoints, the export."""

    def __init__(self, prepared: Prepared, session: Session) -> None:
        super().__init__(prepared, session)
        self._state = session.state
        self._run_id = run_id_of(session.run_dir)
        self._writer = CheckpointWriter(session.checkpoints)
        self._stats = RunStats(prepared.config)
        self._running: RunComponents | None = None
        self._pipeline: Pipeline | None = None
        self._periodic_eval: PeriodicEval | None = None
        self._cascade_alarm = CascadeAlarm(max_errors(prepared.config.reward, prepared.config.rewards))
        self._failing_judges = FailingJudges(prepared.config.judging.judges)
        if self._state is not None:
            self._stats.restore(self._state, prepared.config.train.groups_per_batch)

    @property
    def rows(self) -> Sequence[SampleRow]:
        return self._periodic_eval.rows if self._periodic_eval is not None else ()

    async def run(self) -> Status:
        self._observers.note(f"starting {', '.join(self._config.roles)} ({self._config.cluster.kind})")
        self._running = running = await start(
            self._prepared, self._observers.timeline, self._run_dir, self._observers.requests.of_model
        )
        if (resumed := self._session.resumed) is not None:
            for model in running.trained:
                await model.ranks.load(str(resumed / model.learner_role))
        self._observers.note(f"ready after {self._stats.since_start_s:.0f} s; files in {self._run_dir}")
        self._stats.watch(running)
        return await run_until(self._train(running), **running.background())

    async def after_failure(self, error: Exception) -> str:
        await self._writer.close(wait=True)
        return self._save_failed_batch(error)

    async def close(self) -> None:
        await self._writer.close(wait=False)
        if self._running is not None:
            await self._running.close()

    async def _train(self, running: RunComponents) -> Status:
        """Make all steps, between two held-out evaluations."""
        with asking_for("preflight"):
            await self._try_judge(running)
        pipeline_state, kept = self._restore()
        periodic_eval, cotrainings = self._make_periodic_eval(running), self._make_cotrainings(running, kept)
        parts = make_parts(self._prepared, running, self._observers, cotrainings)
        judge_monitor = self._make_judge_monitor(running, parts, periodic_eval)
        await parts.push_weights(pipeline_state.version)
        await cotrainings.push()
        await running.policy_updates.restore(pipeline_state.version)
        policy_judges = self._config.judging.by_policy
        judging_version = cotrainings.version + running.policy_updates.count(pipeline_state.version)
        judging_version += pipeline_state.version if policy_judges else 0
        pipeline_state = replace(pipeline_state, judge_version=judging_version)

        async def after_step(report: StepReport) -> None:
            await self._after_step(report, running, pipeline, periodic_eval, judge_monitor)

        config = self._config
        numbers = FlowConfig.of(
            config.train, config.rollout, config.algorithm, config.judging.max_concurrency, config.seed, config.env
        )
        whole = varies_by_group(config.reward, config.rewards)
        numbers = replace(numbers, policy_judges=policy_judges, keeps_whole_groups=whole)
        self._pipeline = pipeline = Pipeline(parts, numbers, after_step, pipeline_state, kept)
        running.maintenance.stops(pipeline.clock)
        if self._state is not None:
            pipeline.counters.restore(self._state.totals, self._state.open_counts)
            self._cascade_alarm.check(pipeline.counters.total.cascades)  # what was said before the resume
        for work in kept.values():
            pipeline.counters.recovered(work.uncounted)
        bounds_of(running.judge).go_on(pipeline.counters.total_so_far().cascades)
        if not periodic_eval.initial:
            await periodic_eval.first(
                pipeline_state.version, lambda: judge_monitor.first(pipeline_state.version, periodic_eval.seen)
            )
            judge_monitor.act(last=False)
        return await self._run_pipeline(running, pipeline, periodic_eval, cotrainings)

    async def _run_pipeline(
        self,
        running: RunComponents,
        pipeline: Pipeline,
        periodic_eval: PeriodicEval,
        cotrainings: CoTrainings,
    ) -> Status:
        """Run to the last step, or to the step in which a signal came; both end with a checkpoint."""

        async def flow() -> None:
            await pipeline.run()
            await periodic_eval.last(pipeline.version)
            if periodic_eval.interrupted and not periodic_eval.final:
                raise Interrupted

        try:
            with asked_to_stop(lambda: self._stop(pipeline)), infrequent_gc():
                await cotrainings.run_alongside(pipeline, flow)
        except Interrupted:
            await running.learner.discard()
            if running.critic is not None:
                await running.critic.discard()
            await self._checkpoint(running, pipeline, periodic_eval)
            await self._writer.settled()
            return "interrupted"
        await self._checkpoint(running, pipeline, periodic_eval)
        await self._writer.settled()
        await self._export(running)
        return "completed"

    async def _after_step(
        self,
        report: StepReport,
        running: RunComponents,
        pipeline: Pipeline,
        periodic_eval: PeriodicEval,
        judge_monitor: JudgeMonitor,
    ) -> None:
        self._writer.check()
        last = report.step == self._config.train.num_steps
        learnt = self._stats.cotrainings.after_policy_step(report.step)
        self._stats.learner_busy_s += report.learner_busy_s
        counts = pipeline.counters.close_step()
        metrics = step_metrics(report, counts, pipeline.ledger, self._prepared.is_right, self._config.algorithm)
        metrics |= {f"engines/replaced_{role}": float(n) for role, n in self._stats.engines_replaced.items()}
        metrics |= self._stats.slot_metrics() | self._stats.driver_metrics() | learnt
        metrics |= await periodic_eval.after_step(report.step, last)
        metrics |= await running.policy_updates.after_step(report.step, pipeline.change_judge)
        if periodic_eval.readings:
            metrics["alarm/hacking"] = float(periodic_eval.ringing)
        for alarm in self._cascade_alarm.check(pipeline.counters.total.cascades):
            periodic_eval.report_alarm(alarm)
        for alarm in self._failing_judges.check(counts.by_judge):
            periodic_eval.report_alarm(alarm)
        metrics |= self._cascade_alarm.metrics() | self._failing_judges.metrics()
        metrics |= await judge_monitor.after_step(report.step, metrics)
        self._observers.tracker.log(report.step, metrics)
        self._observers.tracker.table(report.step, periodic_eval.rows)
        judge_monitor.act(last)
        every = self._config.train.checkpoint_every
        if every and report.step % every == 0 and not last:
            await self._checkpoint(running, pipeline, periodic_eval)
        self._stats.step_begins()

    def _make_cotrainings(self, running: RunComponents, kept: Mapping[int, RecoveredGroup]) -> CoTrainings:
        """The training of GRMs next to the policy, with the rollouts that a resume found."""
        prompts = self._prepared.prompts
        rollouts = [(prompts.at(index), rollout) for index, work in kept.items() for rollout in work.rollouts]
        before = self._state.grm_pipeline_states if self._state is not None else {}
        self._stats.cotrainings = CoTrainings(
            [
                CoTraining(
                    self._prepared,
                    grm,
                    self._run_dir,
                    self._observers.timeline,
                    running.maintenance.health,
                    before.get(grm.model.name),
                    rollouts,
                )
                for grm in running.trainable_grms
            ]
        )
        return self._stats.cotrainings

    async def _try_judge(self, running: RunComponents) -> None:
        """Raises ConfigError for a judge whose endpoint serves nothing, and at the start of a run for one whose answers
        can't be read.
        """
        config, prompts = self._config, self._prepared.prompts
        first = [prompts.at(prompt_index) for prompt_index in range(min(NUM_PROMPTS, len(prompts)))]
        judge, members = with_own_bounds(running.judge), members_of(running.judge)
        asking = {**config.judging.generative, **config.judging.scalar}
        outside = [name for name, one in asking.items() if one.model in config.judging.remote_roles]
        try:
            if self._state is None and config.judged_by_model:
                if problem := await preflight_judgements(judge, members, config.judging.generative, first):
                    raise ConfigError(problem)
                outside = [name for name in outside if name not in config.judging.generative]
            for name in outside:
                await tried(members.get(name, judge), first[0])
        except EngineDenied as error:
            raise ConfigError(str(error)) from error

    def _make_periodic_eval(self, running: RunComponents) -> PeriodicEval:
        judge, evaluator = self._config.judge, make_evaluator(self._prepared, running)
        evaluator.episodes.add(self._stats.held_out)
        self._stats.held_out = evaluator.episodes
        self._periodic_eval = PeriodicEval(
            evaluator,
            RewardHackingDetector(
                min_reward_rise=judge.anchor_min_reward_rise, min_gold_fall=judge.anchor_min_gold_fall
            ),
            self._observers,
            self._run_dir / ANCHORS,
            anchors=judge.anchors,
            every=judge.anchor_every,
        )
        if (state := self._state) is not None:
            self._periodic_eval.restore(state.eval_initial, state.alarms, state.hacking_readings)
            skill_of(running.judge).measured(state.judge_accuracy)
        return self._periodic_eval

    def _make_judge_monitor(
        self, running: RunComponents, parts: PipelineComponents, periodic_eval: PeriodicEval
    ) -> JudgeMonitor:
        """Call after `_restore`: it continues from the file of metrics."""
        config, first = self._config, self._config.first_judge
        assert isinstance(parts.judge_guard, JudgeFitness)
        generative, members = self._config.judging.generative, members_of(running.judge)
        learning = {POLICY, *self._config.trained_grms, *running.policy_updates.versions}
        changing = {name for name, one in generative.items() if one.model in learning}
        monitored = MonitoredJudge(
            judge=running.judge,
            members=members,
            frozen=members.keys() - changing if members else () if changing else ("",),
            fitness=parts.judge_guard,
            compares=config.judging.compares,
            scale=(first.score_min, first.score_max),
            show_thoughts=first.show_thoughts,
        )
        watch = config.judge_monitor if config.judged_by_model else replace(config.judge_monitor, every=0)
        return JudgeMonitor(monitored, watch, self._run_dir, periodic_eval.report_alarm, self._observers.note)

    async def _export(self, running: RunComponents) -> None:
        """Export every trained model as a Hugging Face directory with the chat template that it was trained with."""
        for model in running.trained:
            await export(model.ranks, self._run_dir / model.name, model.settings)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _restore(self) -> tuple[PipelineState, dict[int, RecoveredGroup]]:
        """The state to continue from: a checkpoint, or the beginning; with what the journals have after it."""
        pipeline_state = self._state.pipeline_state if self._state else PipelineState()
        run_id, marks = self._run_id, self._state.journal_marks if self._state else {}
        counted = self._state.counted_marks if self._state else NOTHING_COUNTED
        kept = find_kept(self._run_dir, pipeline_state, self._prepared.prompts, run_id, marks, counted)
        void_group_ends(self._run_dir, pipeline_state, run_id, marks.get(GROUPS))
        self._observers.recorder.go_on(marks, [work.group_id for work in kept.values()])
        self._observers.metrics.truncate_after(pipeline_state.version if self._state else -1)
        if self._state is not None or kept:
            rollouts = sum(len(work.rollouts) for work in kept.values())
            verdicts = sum(len(work.reports) for work in kept.values())
            message = (
                f"resumed at step {pipeline_state.version}: {rollouts} rollouts kept, {verdicts} of them with verdicts"
            )
            log.info("%s", message)
            self._observers.note(message)
        return pipeline_state, kept

    async def _checkpoint(self, running: RunComponents, pipeline: Pipeline, periodic_eval: PeriodicEval) -> None:
        """Begin a checkpoint; with train.async_checkpoints=false it is complete when this returns, otherwise soon."""
        await self._writer.settled()
        check_is_there(self._run_dir, self._run_id)
        draft, aside = self._session.checkpoints.draft(pipeline.version), self._config.train.async_checkpoints
        state = RunState(
            pipeline_state=pipeline.state(),
            # Taken at the same moment as the pipeline's state:
            journal_marks=self._observers.recorder.marks(),
            counted_marks=self._observers.recorder.ends(),
            totals=pipeline.counters.saved(),
            open_counts=pipeline.counters.saved_step(),
            grm_pipeline_states=await self._stats.cotrainings.begin_save(draft, aside=aside),
            wall_s=self._stats.wall_s,
            eval_initial=periodic_eval.initial,
            held_out_envs=self._stats.held_out.saved(),
            busy_s=self._stats.busy_s(pipeline),
            alarms=tuple(periodic_eval.alarms),
            run_id=self._run_id,
            wandb_run_id=self._observers.wandb.run_id,
            hacking_readings=tuple(periodic_eval.readings),
            judge_accuracy=skill_of(running.judge).accuracy,
            engines_replaced=self._stats.engines_replaced,
            moves=self._stats.moves,
        )
        ranks = {model.learner_role: model.ranks for model in running.trained}
        begun = {grm.learner_role for grm in running.trainable_grms}  # by their own flows
        for role, learner in ranks.items():
            if role not in begun:
                await learner.begin_save(str(draft / role), aside=aside)
        self._writer.publish_when_written(draft, state, ranks)
        if not aside:
            await self._writer.settled()

    def _save_failed_batch(self, error: Exception) -> str:
        """Save the batch of a step with non-finite numbers, to replay it. Returns a line for the user."""
        if not isinstance(error, ArithmeticError) or self._pipeline is None:
            return ""
        path = self._run_dir / "failed_batch.jsonl"
        try:
            path.write_text("".join(json.dumps(asdict(group)) + "\n" for group in self._pipeline.buffer.batch), "utf-8")
        except OSError as refused:  # a full disk must not hide the first cause
            return f"\nthe batch could not be written to {path}: {refused.strerror}"
        return f"\nthe batch is in {path}, one group per line"

    # -- ends --------------------------------------------------------------------------------------------------------

    def _stop(self, pipeline: Pipeline) -> None:
        self._observers.note("stopping after this step, with a checkpoint; a second signal stops at once")
        pipeline.interrupt()
        if self._periodic_eval is not None:
            self._periodic_eval.interrupt()

    def summary(self, status: Status, failure: str | None) -> Summary:
        evaluated: tuple[Metrics, Metrics, tuple[str, ...]] = ({}, {}, ())
        if (evaluate := self._periodic_eval) is not None:
            evaluated = (evaluate.initial, evaluate.final, tuple(evaluate.alarms))
        elif (state := self._state) is not None:
            evaluated = (state.eval_initial, {}, state.alarms)
        return self._stats.summary(status, failure, self._pipeline, *evaluated)
