"""One training run: start or resume, look, flow, look, sum up; and every way out of it leaves whole files."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from grmpipe.config.run_config import ConfigError
from grmpipe.judge.monitor.failure_gate import HackingAlarm, JudgeFitness
from grmpipe.judge.monitor.preflight import NUM_PROMPTS, dry_judgement
from grmpipe.observe.recorder import GROUPS
from grmpipe.observe.summary import Status, Summary, written
from grmpipe.pipeline.counters import step_metrics
from grmpipe.pipeline.interfaces import Cut, FlowConfig, Kept, Parts, StepReport
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.training import Interrupted
from grmpipe.run.components import make_evaluator, make_parts
from grmpipe.run.cotrain.cotraining import CoTraining
from grmpipe.run.judge_monitoring import Watched, Watchman
from grmpipe.run.observers import Observers
from grmpipe.run.periodic_eval import Lookout
from grmpipe.run.signals import asked_to_stop, ended_by_signals
from grmpipe.run.start import Running, start
from grmpipe.run.stats import Accounts
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
from scheduler.gc_tuning import seldom_collected
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
    observers.show_end(run_dir, run.lookout.rows if run.lookout else [], summary.bottleneck)
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
        self.lookout: Lookout | None = None
        self._prepared = prepared
        self._config = prepared.config
        self._run_dir = run_dir
        self._observers = observers
        self._checkpoints = checkpoints
        self._writer = CheckpointWriter(checkpoints)
        self._accounts = Accounts(prepared.config)
        self._pipeline: Pipeline | None = None
        self._state = state
        if state is not None:
            self._accounts.restore(state, prepared.config.train.groups_per_batch)

    async def execute(self, resumed: Path | None) -> Summary:
        """`resumed`: the checkpoint that holds the learner."""
        running: Running | None = None
        try:
            self._observers.note(f"starting {', '.join(self._config.roles)} ({self._config.cluster.kind})")
            running = await start(self._prepared, self._observers.timeline, self._run_dir)
            if resumed is not None:
                await running.learner.load(str(resumed / "learner"))
                if running.trainee is not None:
                    await running.trainee.learner.load(str(resumed / "grm_learner"))
                if running.critic is not None:
                    await running.critic.ranks.load(str(resumed / "critic"))
            self._observers.note(f"ready after {self._accounts.since_start_s:.0f} s; files in {self._run_dir}")
            self._accounts.cluster = running.cluster
            self._accounts.health, self._accounts.elastic = running.health, running.elastic
            self._accounts.scorers, self._accounts.critic = running.scorers, running.critic
            looks = {f"the health of {health.role}": health.run() for health in running.health}
            balance = {f"the balance of {pool.name}": pool.run() for pool in running.elastic}
            values = {"the values of the critic": running.critic.valuer.run()} if running.critic is not None else {}
            return self._summary(await run_until(self._train(running), **looks, **balance, **values))
        except asyncio.CancelledError:
            return self._summary("interrupted")
        except ConfigError:  # found on a dry judgement: nothing was trained
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

    async def _train(self, running: Running) -> Status:
        """All steps, between two looks at the held-out problems."""
        if self._state is None and self._config.judged_by_model:
            await self._try_judge(running)
        cut, kept = self._restore()
        lookout, parts = self._make_lookout(running), make_parts(self._prepared, running, self._observers)
        watchman = self._make_watchman(running, parts, lookout)
        await parts.push_weights(cut.version)
        if (cotraining := self._make_cotraining(running)) is not None:
            await cotraining.push(cotraining.version)
            parts, cut = cotraining.joined(parts), replace(cut, judge_version=cotraining.version)

        async def after_step(report: StepReport) -> None:
            await self._after_step(report, running, pipeline, lookout, watchman)

        config = self._config
        numbers = FlowConfig.of(config.train, config.rollout, config.algorithm, config.judge.width, config.seed)
        self._pipeline = pipeline = Pipeline(parts, numbers, after_step, cut, kept)
        running.stops(pipeline.clock)
        if self._state is not None:
            pipeline.tally.restore(self._state.totals)
        if not lookout.initial:
            await lookout.first(cut.version, lambda: watchman.first(cut.version, lookout.seen))
            watchman.act(last=False)

        async def flow() -> None:
            await pipeline.run()
            await lookout.last(pipeline.version)
            if lookout.interrupted and not lookout.final:
                raise Interrupted

        try:
            with asked_to_stop(lambda: self._stop(pipeline)), seldom_collected():
                await (flow() if cotraining is None else cotraining.beside(pipeline, flow))
        except Interrupted:
            await running.learner.discard()
            if running.critic is not None:
                await running.critic.discard()
            await self._checkpoint(running, pipeline, lookout)
            await self._writer.settled()
            return "interrupted"
        await self._checkpoint(running, pipeline, lookout)
        await self._writer.settled()
        await self._export(running)
        return "completed"

    async def _after_step(
        self, report: StepReport, running: Running, pipeline: Pipeline, lookout: Lookout, watchman: Watchman
    ) -> None:
        self._writer.check()
        last = report.step == self._config.train.num_steps
        cotraining = self._accounts.cotraining
        learnt = cotraining.after_policy_step(report.step) if cotraining is not None else {}
        self._accounts.learner_busy_s += report.learner_busy_s
        counts = pipeline.tally.close_step()
        metrics = step_metrics(report, counts, pipeline.ledger, self._prepared.is_right, self._config.algorithm)
        metrics |= {f"engines/replaced_{role}": float(n) for role, n in self._accounts.engines_replaced.items()}
        metrics |= self._accounts.slot_metrics() | self._accounts.driver_metrics() | learnt
        metrics |= await lookout.after_step(report.step, last)
        metrics["alarm/hacking"] = float(lookout.ringing)
        metrics |= await watchman.after_step(report.step, metrics)
        self._observers.tracker.log(report.step, metrics)
        self._observers.tracker.table(report.step, lookout.rows)
        watchman.act(last)
        every = self._config.train.checkpoint_every
        if every and report.step % every == 0 and not last:
            await self._checkpoint(running, pipeline, lookout)
        self._accounts.step_begins()

    def _make_cotraining(self, running: Running) -> CoTraining | None:
        """Of a GRM that learns beside the policy."""
        if running.trainee is None:
            return None
        self._accounts.cotraining = CoTraining(
            self._prepared,
            running.trainee,
            self._run_dir,
            self._observers.timeline,
            running.health,
            self._state.grm_cut if self._state is not None else None,
        )
        return self._accounts.cotraining

    async def _try_judge(self, running: Running) -> None:
        """Raises ConfigError for a judge whose answers can't be read."""
        prompts = [self._prepared.prompts.at(draw) for draw in range(min(NUM_PROMPTS, len(self._prepared.prompts)))]
        if told := await dry_judgement(running.judge, self._config.judge, prompts):
            raise ConfigError(f"judge.{told}")

    def _make_lookout(self, running: Running) -> Lookout:
        judge = self._config.judge
        self.lookout = Lookout(
            make_evaluator(self._prepared, running),
            HackingAlarm(
                min_score_rise=judge.shown_score(judge.anchor_min_score_rise), min_gold_fall=judge.anchor_min_gold_fall
            ),
            self._observers,
            anchors=judge.anchors,
            every=judge.anchor_every,
        )
        if (state := self._state) is not None:
            self.lookout.restore(state.eval_initial, state.alarms, state.hacking_readings)
        return self.lookout

    def _make_watchman(self, running: Running, parts: Parts, lookout: Lookout) -> Watchman:
        """After `_restore`: it goes on from what the metrics' file holds."""
        config, judge = self._config, self._config.judge
        assert isinstance(parts.watch, JudgeFitness)
        watched = Watched(
            judge=running.judge,
            fitness=parts.watch,
            compares=judge.protocol_kind.compares,
            frozen=running.trainee is None,
            scale=(judge.score_min, judge.score_max),
        )
        watch = config.watch if config.judged_by_model else replace(config.watch, every=0)
        return Watchman(watched, watch, self._run_dir, lookout.tell)

    async def _export(self, running: Running) -> None:
        """Whatever was trained, as Hugging Face directories, with the chat template that it was trained under."""
        trained: dict[str, tuple[LearnerGroup | CriticGroup, ModelConfig]] = {
            "policy": (running.learner, self._config.policy)
        }
        if running.critic is not None:
            trained["critic"] = (running.critic.ranks, self._config.policy)
        if running.trainee is not None:
            trained["grm"] = (running.trainee.learner, self._config.grm)
        for name, (learner, model) in trained.items():
            directory = self._run_dir / name
            await learner.export(str(directory))
            if template := model.chat_template:
                shutil.copyfile(template, directory / "chat_template.jinja")

    # -- cuts --------------------------------------------------------------------------------------------------------

    def _restore(self) -> tuple[Cut, dict[int, Kept]]:
        """Where to go on: a checkpoint, or the beginning; in both cases with what the journals hold beyond it."""
        cut = self._state.cut if self._state else Cut()
        run_id, marks = run_id_of(self._run_dir), self._state.journal_marks if self._state else {}
        kept = find_kept(self._run_dir, cut, self._prepared.prompts, run_id, marks)
        void_group_ends(self._run_dir, cut, run_id, marks.get(GROUPS))
        self._observers.recorder.go_on(marks, [work.group_id for work in kept.values()])
        self._observers.metrics.truncate_after(cut.version if self._state else -1)
        if self._state is not None or kept:
            rollouts = sum(len(work.rollouts) for work in kept.values())
            verdicts = sum(len(work.reports) for work in kept.values())
            told = f"resumed at step {cut.version}: {rollouts} rollouts kept, {verdicts} of them with verdicts"
            log.info("%s", told)
            self._observers.note(told)
        return cut, kept

    async def _checkpoint(self, running: Running, pipeline: Pipeline, lookout: Lookout) -> None:
        """Begin one; with train.async_checkpoints=false it is there at the end, else soon."""
        await self._writer.settled()
        draft, aside = self._checkpoints.draft(pipeline.version), self._config.train.async_checkpoints
        cotraining = self._accounts.cotraining
        grm = draft / "grm_learner"
        state = RunState(
            cut=pipeline.cut(),
            journal_marks=self._observers.recorder.marks(),  # of the same moment as the cut
            grm_cut=await cotraining.begin_save(grm, aside=aside) if cotraining is not None else None,
            wall_s=self._accounts.wall_s,
            eval_initial=lookout.initial,
            totals=pipeline.tally.saved(),
            busy_s=self._accounts.busy_s(pipeline),
            alarms=tuple(lookout.alarms),
            wandb_run_id=self._observers.wandb.run_id,
            hacking_readings=tuple(lookout.readings),
            engines_replaced=self._accounts.engines_replaced,
            moves=self._accounts.moves,
        )
        saving: dict[str, LearnerGroup | CriticGroup] = {"learner": running.learner}
        if running.critic is not None:
            saving["critic"] = running.critic.ranks
        for folder, learner in saving.items():
            await learner.begin_save(str(draft / folder), aside=aside)
        if running.trainee is not None:
            saving[grm.name] = running.trainee.learner
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
        if self.lookout is not None:
            self.lookout.interrupt()

    def _summary(self, status: Status, failure: str | None = None) -> Summary:
        looked: tuple[Metrics, Metrics, tuple[str, ...]] = ({}, {}, ())
        if (look := self.lookout) is not None:
            looked = (look.initial, look.final, tuple(look.alarms))
        elif (state := self._state) is not None:
            looked = (state.eval_initial, {}, state.alarms)
        summary = self._accounts.summary(status, failure, self._pipeline, *looked)
        try:
            return summary.with_objective(self._config.objective)
        except ValueError as error:
            log.info("%s", error)
            return summary
