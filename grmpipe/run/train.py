"""One training run: start or resume, evaluate, flow, evaluate, sum up; and every way out of it leaves whole files."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from grmpipe.config.run_config import ConfigError
from grmpipe.judge.monitor.circuit_breaker import JudgeFitness, RewardHackingDetector
from grmpipe.judge.monitor.preflight import NUM_PROMPTS, preflight_judgement
from grmpipe.observe.recorder import GROUPS
from grmpipe.observe.summary import Status, Summary, written
from grmpipe.pipeline.counters import step_metrics
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, PipelineState, RecoveredGroup, StepReport
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.training import Interrupted
from grmpipe.run.components import make_evaluator, make_parts
from grmpipe.run.cotrain.cotraining import CoTraining
from grmpipe.run.judge_monitoring import JudgeMonitor, MonitoredJudge
from grmpipe.run.observers import Observers
from grmpipe.run.periodic_eval import PeriodicEval
from grmpipe.run.signals import asked_to_stop, ended_by_signals
from grmpipe.run.start import RunComponents, start
from grmpipe.run.stats import RunStats
from grmpipe.run_dir.changes import changes_of
from grmpipe.run_dir.checkpoint_writer import CheckpointWriter
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.run_dir.identity import run_id_of
from grmpipe.run_dir.run_state import RunState, find_kept, void_group_ends
from grmpipe.train.critic.critic_group import CriticGroup
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.types import Metrics
from grmpipe.validate.prepare import Prepared
from models.settings import ModelConfig
from scheduler.gc_tuning import infrequent_gc
from scheduler.supervise import describe_failure, run_until

log = logging.getLogger(__name__)

SUMMARY = "summary.json"


async def train(prepared: Prepared, run_dir: Path, resumed: Path | None) -> Summary:
    """Run to an end of any kind; show at the end what a person wants to see. `resumed`: a checkpoint to go on from."""
    with ended_by_signals():
        return await train_to_an_end(prepared, run_dir, resumed)


async def train_to_an_end(prepared: Prepared, run_dir: Path, resumed: Path | None) -> Summary:
    checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=prepared.config.train.keep_checkpoints)
    state = checkpoints.load(resumed) if resumed else None
    (run_dir / SUMMARY).unlink(missing_ok=True)  # of before a resume: untrue from now on
    observers = Observers.open(prepared.config, run_dir, state.wandb_run_id if state else None)
    run = TrainingRun(prepared, run_dir, observers, checkpoints, state)
    observers.tell_changes(changes := changes_of(run_dir))
    try:
        summary = await run.execute(resumed)
    finally:
        observers.close()
    summary = replace(summary, changes=changes, journal_failures=observers.journal_failures)
    summary = written(summary, run_dir / SUMMARY)
    observers.show_end(run_dir, run.periodic_eval.rows if run.periodic_eval else [], summary.bottleneck)
    return summary


class TrainingRun:
    """From prepared parts to a summary. What goes wrong within the run is not raised: the summary says it."""

    def __init__(
        self,
        prepared: Prepared,
        run_dir: Path,
        observers: Observers,
        checkpoints: Checkpoints,
        state: RunState | None,
    ) -> None:
        """`state`: where a resume goes on from."""
        self.periodic_eval: PeriodicEval | None = None
        self._prepared = prepared
        self._config = prepared.config
        self._run_dir = run_dir
        self._observers = observers
        self._checkpoints = checkpoints
        self._writer = CheckpointWriter(checkpoints)
        self._stats = RunStats(prepared.config)
        self._pipeline: Pipeline | None = None
        self._state = state
        if state is not None:
            self._stats.restore(state, prepared.config.train.groups_per_batch)

    async def execute(self, resumed: Path | None) -> Summary:
        """`resumed`: the checkpoint that holds the learner."""
        running: RunComponents | None = None
        try:
            self._observers.note(f"starting {', '.join(self._config.roles)} ({self._config.cluster.kind})")
            running = await start(self._prepared, self._observers.timeline, self._run_dir)
            if resumed is not None:
                await running.learner.load(str(resumed / "learner"))
                if running.trainable_grm is not None:
                    await running.trainable_grm.learner.load(str(resumed / "grm_learner"))
                if running.critic is not None:
                    await running.critic.ranks.load(str(resumed / "critic"))
            self._observers.note(f"ready after {self._stats.since_start_s:.0f} s; files in {self._run_dir}")
            self._stats.cluster = running.cluster
            self._stats.health, self._stats.elastic = running.health, running.elastic
            self._stats.scorers, self._stats.critic = running.scorers, running.critic
            looks = {f"the health of {health.role}": health.run() for health in running.health}
            balance = {f"the balance of {pool.name}": pool.run() for pool in running.elastic}
            values = (
                {"the values of the critic": running.critic.value_cache.run()} if running.critic is not None else {}
            )
            return self._summary(await run_until(self._train(running), **looks, **balance, **values))
        except asyncio.CancelledError:
            return self._summary("interrupted")
        except ConfigError:  # found on a preflight judgement: nothing was trained
            if self._state is None:  # and the directory is free for the same command with that set right
                (self._run_dir / "config.yaml").unlink(missing_ok=True)
            raise
        except Exception as error:
            log.exception("the run failed", extra={"file_only": True})
            await self._writer.close(wait=True)
            return self._summary("failed", describe_failure(error) + self._save_failed_batch(error))
        finally:
            await self._writer.close(wait=False)
            if running is not None:
                await running.close()

    async def _train(self, running: RunComponents) -> Status:
        """All steps, between two held-out evaluations."""
        if self._state is None and self._config.judged_by_model:
            await self._try_judge(running)
        pipeline_state, kept = self._restore()
        periodic_eval, parts = self._make_periodic_eval(running), make_parts(self._prepared, running, self._observers)
        judge_monitor = self._make_judge_monitor(running, parts, periodic_eval)
        await parts.push_weights(pipeline_state.version)
        if (cotraining := self._make_cotraining(running)) is not None:
            await cotraining.push(cotraining.version)
            parts, pipeline_state = (
                cotraining.with_cotraining(parts),
                replace(pipeline_state, judge_version=cotraining.version),
            )

        async def after_step(report: StepReport) -> None:
            await self._after_step(report, running, pipeline, periodic_eval, judge_monitor)

        config = self._config
        numbers = FlowConfig.of(
            config.train, config.rollout, config.algorithm, config.judge.max_concurrency, config.seed
        )
        self._pipeline = pipeline = Pipeline(parts, numbers, after_step, pipeline_state, kept)
        running.stops(pipeline.clock)
        if self._state is not None:
            pipeline.counters.restore(self._state.totals)
        if not periodic_eval.initial:
            await periodic_eval.first(
                pipeline_state.version, lambda: judge_monitor.first(pipeline_state.version, periodic_eval.seen)
            )
            judge_monitor.act(last=False)

        async def flow() -> None:
            await pipeline.run()
            await periodic_eval.last(pipeline.version)
            if periodic_eval.interrupted and not periodic_eval.final:
                raise Interrupted

        try:
            with asked_to_stop(lambda: self._stop(pipeline)), infrequent_gc():
                await (flow() if cotraining is None else cotraining.run_alongside(pipeline, flow))
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
        cotraining = self._stats.cotraining
        learnt = cotraining.after_policy_step(report.step) if cotraining is not None else {}
        self._stats.learner_busy_s += report.learner_busy_s
        counts = pipeline.counters.close_step()
        metrics = step_metrics(report, counts, pipeline.ledger, self._prepared.is_right, self._config.algorithm)
        metrics |= {f"engines/replaced_{role}": float(n) for role, n in self._stats.engines_replaced.items()}
        metrics |= self._stats.slot_metrics() | self._stats.driver_metrics() | learnt
        metrics |= await periodic_eval.after_step(report.step, last)
        metrics["alarm/hacking"] = float(periodic_eval.ringing)
        metrics |= await judge_monitor.after_step(report.step, metrics)
        self._observers.tracker.log(report.step, metrics)
        self._observers.tracker.table(report.step, periodic_eval.rows)
        judge_monitor.act(last)
        every = self._config.train.checkpoint_every
        if every and report.step % every == 0 and not last:
            await self._checkpoint(running, pipeline, periodic_eval)
        self._stats.step_begins()

    def _make_cotraining(self, running: RunComponents) -> CoTraining | None:
        """Of a GRM that learns beside the policy."""
        if running.trainable_grm is None:
            return None
        self._stats.cotraining = CoTraining(
            self._prepared,
            running.trainable_grm,
            self._run_dir,
            self._observers.timeline,
            running.health,
            self._state.grm_pipeline_state if self._state is not None else None,
        )
        return self._stats.cotraining

    async def _try_judge(self, running: RunComponents) -> None:
        """Raises ConfigError for a judge whose answers can't be read."""
        prompts = [
            self._prepared.prompts.at(prompt_index)
            for prompt_index in range(min(NUM_PROMPTS, len(self._prepared.prompts)))
        ]
        if told := await preflight_judgement(running.judge, self._config.judge, prompts):
            raise ConfigError(f"judge.{told}")

    def _make_periodic_eval(self, running: RunComponents) -> PeriodicEval:
        judge = self._config.judge
        self.periodic_eval = PeriodicEval(
            make_evaluator(self._prepared, running),
            RewardHackingDetector(
                min_score_rise=judge.shown_score(judge.anchor_min_score_rise), min_gold_fall=judge.anchor_min_gold_fall
            ),
            self._observers,
            anchors=judge.anchors,
            every=judge.anchor_every,
        )
        if (state := self._state) is not None:
            self.periodic_eval.restore(state.eval_initial, state.alarms, state.hacking_readings)
        return self.periodic_eval

    def _make_judge_monitor(
        self, running: RunComponents, parts: PipelineComponents, periodic_eval: PeriodicEval
    ) -> JudgeMonitor:
        """After `_restore`: it goes on from what the metrics' file holds."""
        config, judge = self._config, self._config.judge
        assert isinstance(parts.judge_guard, JudgeFitness)
        monitored = MonitoredJudge(
            judge=running.judge,
            fitness=parts.judge_guard,
            compares=judge.protocol_kind.compares,
            frozen=running.trainable_grm is None,
            scale=(judge.score_min, judge.score_max),
        )
        watch = config.judge_monitor if config.judged_by_model else replace(config.judge_monitor, every=0)
        return JudgeMonitor(monitored, watch, self._run_dir, periodic_eval.tell)

    async def _export(self, running: RunComponents) -> None:
        """Whatever was trained, as Hugging Face directories, with the chat template that it was trained under."""
        trained: dict[str, tuple[LearnerGroup | CriticGroup, ModelConfig]] = {
            "policy": (running.learner, self._config.policy)
        }
        if running.critic is not None:
            trained["critic"] = (running.critic.ranks, self._config.policy)
        if running.trainable_grm is not None:
            trained["grm"] = (running.trainable_grm.learner, self._config.grm)
        for name, (learner, model) in trained.items():
            directory = self._run_dir / name
            await learner.export(str(directory))
            if template := model.chat_template:
                shutil.copyfile(template, directory / "chat_template.jinja")

    # -- cuts --------------------------------------------------------------------------------------------------------

    def _restore(self) -> tuple[PipelineState, dict[int, RecoveredGroup]]:
        """Where to go on: a checkpoint, or the beginning; in both cases with what the journals hold beyond it."""
        pipeline_state = self._state.pipeline_state if self._state else PipelineState()
        run_id, marks = run_id_of(self._run_dir), self._state.journal_marks if self._state else {}
        kept = find_kept(self._run_dir, pipeline_state, self._prepared.prompts, run_id, marks)
        void_group_ends(self._run_dir, pipeline_state, run_id, marks.get(GROUPS))
        self._observers.recorder.go_on(marks, [work.group_id for work in kept.values()])
        self._observers.metrics.truncate_after(pipeline_state.version if self._state else -1)
        if self._state is not None or kept:
            rollouts = sum(len(work.rollouts) for work in kept.values())
            verdicts = sum(len(work.reports) for work in kept.values())
            told = (
                f"resumed at step {pipeline_state.version}: {rollouts} rollouts kept, {verdicts} of them with verdicts"
            )
            log.info("%s", told)
            self._observers.note(told)
        return pipeline_state, kept

    async def _checkpoint(self, running: RunComponents, pipeline: Pipeline, periodic_eval: PeriodicEval) -> None:
        """Begin one; with train.async_checkpoints=false it is there at the end, else soon."""
        await self._writer.settled()
        draft, aside = self._checkpoints.draft(pipeline.version), self._config.train.async_checkpoints
        cotraining = self._stats.cotraining
        grm = draft / "grm_learner"
        state = RunState(
            pipeline_state=pipeline.state(),
            journal_marks=self._observers.recorder.marks(),  # of the same moment as the cut
            grm_pipeline_state=await cotraining.begin_save(grm, aside=aside) if cotraining is not None else None,
            wall_s=self._stats.wall_s,
            eval_initial=periodic_eval.initial,
            totals=pipeline.counters.saved(),
            busy_s=self._stats.busy_s(pipeline),
            alarms=tuple(periodic_eval.alarms),
            wandb_run_id=self._observers.wandb.run_id,
            hacking_readings=tuple(periodic_eval.readings),
            engines_replaced=self._stats.engines_replaced,
            moves=self._stats.moves,
        )
        saving: dict[str, LearnerGroup | CriticGroup] = {"learner": running.learner}
        if running.critic is not None:
            saving["critic"] = running.critic.ranks
        for folder, learner in saving.items():
            await learner.begin_save(str(draft / folder), aside=aside)
        if running.trainable_grm is not None:
            saving[grm.name] = running.trainable_grm.learner
        self._writer.publish_when_written(draft, state, saving)
        if not aside:
            await self._writer.settled()

    def _save_failed_batch(self, error: Exception) -> str:
        """The batch of a step that came to no number, to be replayed. Returns a line for the user."""
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
        if self.periodic_eval is not None:
            self.periodic_eval.interrupt()

    def _summary(self, status: Status, failure: str | None = None) -> Summary:
        evaluated: tuple[Metrics, Metrics, tuple[str, ...]] = ({}, {}, ())
        if (evaluate := self.periodic_eval) is not None:
            evaluated = (evaluate.initial, evaluate.final, tuple(evaluate.alarms))
        elif (state := self._state) is not None:
            evaluated = (state.eval_initial, {}, state.alarms)
        summary = self._stats.summary(status, failure, self._pipeline, *evaluated)
        try:
            return summary.with_objective(self._config.objective)
        except ValueError as error:
            log.info("%s", error)
            return summary
