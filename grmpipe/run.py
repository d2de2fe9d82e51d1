"""One training run: start or resume, look, flow, look, sum up. What happens after each step, and on every way out."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grmpipe.assemble import (
    Prepared,
    Running,
    make_evaluator,
    make_play,
    make_push,
    start,
    too_long,
)
from grmpipe.evaluate import Evaluation
from grmpipe.flow import Cut, FlowConfig, Kept, Parts, StepReport
from grmpipe.judge.fitness import JudgeFitness
from grmpipe.judge.rule import RULES
from grmpipe.judge.watch import FailureGate, HackingAlarm
from grmpipe.observe.sample_rows import SampleRow, sample_row
from grmpipe.observe.summary import EvalSummary, GroupsSummary, JudgingSummary, Status, Summary
from grmpipe.observers import FILES, Observers
from grmpipe.pipeline import Interrupted, Pipeline
from grmpipe.run_state import Checkpoints, RunState, find_kept, void_group_ends
from grmpipe.tally import batch_metrics, flow_metrics
from grmpipe.train.batch import BatchTrainer
from grmpipe.train.learner import NonFiniteGradients
from grmpipe.types import JudgedGroup, Metrics
from scheduler.supervise import describe_failure

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """What a run came to so far; over all its sessions."""

    wall_before_s: float = 0.0
    busy_before_s: Mapping[str, float] = field(default_factory=dict)
    learner_busy_s: float = 0.0
    eval_initial: Metrics = field(default_factory=dict)
    eval_final: Metrics = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    readings: list[tuple[int, float, float]] = field(default_factory=list)
    rows: list[SampleRow] = field(default_factory=list)


class TrainingRun:
    """From prepared parts to a summary. What goes wrong within the run is not raised: the summary says it."""

    def __init__(self, prepared: Prepared, run_dir: Path, observers: Observers, resumed: Path | None) -> None:
        config = prepared.config
        self._prepared = prepared
        self._config = config
        self._run_dir = run_dir
        self._observers = observers
        self._checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=config.train.keep_checkpoints)
        self._resumed = resumed
        self._progress = Progress()
        self._began_s = time.monotonic()
        self._alarm = HackingAlarm(
            min_score_rise=config.judge.anchor_min_score_rise, min_gold_fall=config.judge.anchor_min_gold_fall
        )
        self._pipeline: Pipeline | None = None

    async def execute(self) -> Summary:
        """Run to an end of any kind; leave every file complete."""
        status: Status = "failed"
        failure: str | None = None
        running: Running | None = None
        try:
            running = await start(self._prepared, self._observers.timeline)
            self._observers.note(f"ready after {self._session_s():.0f} s; {self._where()}")
            status = await self._train(running)
            if status == "completed":
                await self._finish(running)
        except asyncio.CancelledError:
            status = "interrupted"
        except Exception as error:
            failure = describe_failure(error)
            log.exception("the run failed")
            self._save_failed_batch(error)
        finally:
            self._observers.close()
            if running is not None:
                await running.close()
        summary = self._summary(status if failure is None else "failed", failure)
        summary.write(self._run_dir / "summary.json")
        return summary

    # -- the flow ----------------------------------------------------------------------------------------------------

    async def _train(self, running: Running) -> Status:
        cut, kept = await self._restore(running)
        self._running = running
        self._push = make_push(self._prepared, running)
        await self._push(cut.version)
        self._evaluator = make_evaluator(self._prepared, running)
        self._pipeline = Pipeline(self._parts(running), self._flow_config(), self._after_step, cut, kept)
        self._restore_tally(self._pipeline)
        if not self._progress.eval_initial:
            first = await self._look(cut.version, None)
            self._log_look(cut.version, first)
            self._progress.eval_initial = first.metrics
        loop = asyncio.get_running_loop()
        for stop in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(stop, self._pipeline.interrupt)
        try:
            await self._pipeline.run()
        except Interrupted:
            await running.learner.discard()
            await self._checkpoint()
            return "interrupted"
        finally:
            for stop in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(stop)
        return "completed"

    async def _finish(self, running: Running) -> None:
        assert self._pipeline is not None
        if not self._progress.eval_final:  # the prompts were over before the steps
            looked = await self._look(self._pipeline.version, None)
            self._log_look(self._pipeline.version, looked)
            self._progress.eval_final = looked.metrics
        await self._checkpoint()
        await running.learner.export(str(self._run_dir / "policy"))

    def _parts(self, running: Running) -> Parts:
        config = self._config
        gate = FailureGate(
            max_failure_rate=config.judge.max_failure_rate,
            window=config.judge.failure_window,
            pause_s=config.judge.pause_s,
        )
        return Parts(
            prompts=self._prepared.prompts,
            too_long=too_long(self._prepared),
            play=make_play(self._prepared, running.policy, config.rollout.temperature),
            judge=running.judge,
            watch=JudgeFitness(gate),
            trainer=BatchTrainer(running.learner, config.train, config.algorithm),
            push_weights=self._push,
            journal=self._observers.recorder,
            events=self._observers.timeline,
        )

    def _flow_config(self) -> FlowConfig:
        config = self._config
        return FlowConfig(
            num_steps=config.train.num_steps,
            groups_per_batch=config.train.groups_per_batch,
            group_size=config.train.group_size,
            min_valid_siblings=config.train.min_valid_siblings,
            max_staleness=config.train.max_staleness,
            group_deadline_s=config.rollout.group_deadline_s,
            play_width=config.rollout.width,
            judge_width=config.judge.width,
            seed=config.seed,
        )

    # -- after each step ---------------------------------------------------------------------------------------------

    async def _after_step(self, report: StepReport) -> None:
        assert self._pipeline is not None
        counts = self._pipeline.tally.close_step()
        self._progress.learner_busy_s += report.learner_busy_s
        metrics = {
            **flow_metrics(counts, report.step_s),
            **batch_metrics(report.groups, report.step - 1),
            **report.learner,
            **self._truth(report.groups),
            "time/step_s": report.step_s,
            "time/learner_s": report.learner_busy_s,
            "wait/learner_for_groups_s": report.wait_for_groups_s,
            "wait/engines_for_learner_s": report.policy_idle_s,
            "sync/push_s": report.sync.seconds,
            "sync/pause_s": report.sync.pause_seconds,
            "sync/bytes": float(report.sync.num_bytes),
            "sync/probe_error_nats": report.sync.probe_error,
            "groups/in_flight": float(len(self._pipeline.admission.in_flight)),
            **{f"groups/dropped_{cause}": float(n) for cause, n in self._pipeline.admission.dropped.items()},
        }
        last = report.step == self._config.train.num_steps
        if last or report.step % self._config.judge.anchor_every == 0:
            looked = await self._look(report.step, None if last else self._config.judge.anchors)
            metrics |= {f"eval/{name}": value for name, value in looked.metrics.items()}
            self._progress.eval_final = looked.metrics if last else {}
        metrics["alarm/hacking"] = float(bool(self._progress.alarms))
        self._observers.tracker.log(report.step, metrics)
        self._observers.tracker.table(report.step, self._progress.rows)
        every = self._config.train.checkpoint_every
        if every and report.step % every == 0 and not last:
            await self._checkpoint()

    def _log_look(self, step: int, looked: Evaluation) -> None:
        """A look that belongs to no step."""
        self._observers.tracker.log(step, {f"eval/{name}": value for name, value in looked.metrics.items()})

    def _truth(self, groups: tuple[JudgedGroup, ...]) -> Metrics:
        """How much of the batch is right by the rule: shown, never trained on."""
        rule = RULES[self._config.judge.rule]
        try:
            right = [
                rule(rollout.text, group.prompt.reference)
                for group in groups
                if group.prompt.reference is not None
                for rollout in group.rollouts
            ]
        except ValueError:  # a reference that this rule can't read
            return {}
        return {"train/true_accuracy": sum(right) / len(right)} if right else {}

    async def _look(self, step: int, limit: int | None) -> Evaluation:
        """Held-out problems, and with them the alarm: does the judge like what is wrong?"""
        looked = await self._evaluator.look(f"look{step}", limit)
        self._progress.rows = [
            sample_row(one.prompt, one.rollout, one.report, None if one.right is None else float(one.right))
            for one in looked.rollouts
        ]
        log.info("held-out at step %d: %s", step, looked.metrics)
        if {"grm_score", "true_accuracy"} <= looked.metrics.keys():
            self._sound_alarm(step, looked.metrics["grm_score"], looked.metrics["true_accuracy"])
        return looked

    def _sound_alarm(self, step: int, score: float, gold: float) -> None:
        self._progress.readings.append((step, score, gold))
        told = self._alarm.record(step=step, grm_score=score, gold_accuracy=gold)
        if told is not None:
            self._progress.alarms.append(told)
            log.error("alarm: %s", told)
            self._observers.alarm(told)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def _checkpoint(self) -> None:
        assert self._pipeline is not None
        draft = self._checkpoints.draft(self._pipeline.version)
        await self._running.learner.save(str(draft / "learner"))
        self._checkpoints.publish(draft, self._state(self._pipeline))

    def _state(self, pipeline: Pipeline) -> RunState:
        return RunState(
            cut=pipeline.cut(),
            wall_s=self._wall_s(),
            eval_initial=self._progress.eval_initial,
            totals=pipeline.tally.saved(),
            busy_s=self._busy_s(),
            alarms=tuple(self._progress.alarms),
            wandb_run_id=self._observers.wandb.run_id,
            hacking_readings=tuple(self._progress.readings),
        )

    async def _restore(self, running: Running) -> tuple[Cut, dict[int, Kept]]:
        """Where to go on: the beginning, or the checkpoint with what the journals hold beyond it."""
        if self._resumed is None:
            return Cut(), {}
        state = self._checkpoints.load(self._resumed)
        version = await running.learner.load(str(self._resumed / "learner"))
        log.info("resumed from %s, optimizer step %d", self._resumed, version)
        self._progress = Progress(
            wall_before_s=state.wall_s,
            busy_before_s=state.busy_s,
            eval_initial=state.eval_initial,
            alarms=list(state.alarms),
            readings=list(state.hacking_readings),
        )
        for step, score, gold in state.hacking_readings:
            self._alarm.record(step=step, grm_score=score, gold_accuracy=gold)
        kept = find_kept(self._run_dir, state.cut)
        void_group_ends(self._run_dir, state.cut)
        self._observers.metrics.truncate_after(state.cut.version)
        return state.cut, kept

    def _restore_tally(self, pipeline: Pipeline) -> None:
        if self._resumed is not None:
            pipeline.tally.restore(self._checkpoints.load(self._resumed).totals)

    def _save_failed_batch(self, error: Exception) -> None:
        """The batch of a step that could not be made, to be replayed."""
        if isinstance(error, NonFiniteGradients) and self._pipeline is not None:
            path = self._run_dir / "failed_batch.jsonl"
            lines = [
                json.dumps({"group_id": group.group_id, "prompt_id": group.prompt.prompt_id, "group": asdict(group)})
                for group in self._pipeline.open_batch
            ]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    # -- sums --------------------------------------------------------------------------------------------------------

    def _summary(self, status: Status, failure: str | None) -> Summary:
        pipeline, progress = self._pipeline, self._progress
        versions = {"policy": pipeline.version if pipeline else 0}
        if self._prepared.grm is not None:
            versions[self._prepared.grm.name] = 0
        summary = Summary(
            status=status,
            steps=versions["policy"],
            versions=versions,
            wall_s=self._wall_s(),
            eval=EvalSummary(initial=progress.eval_initial, final=progress.eval_final),
            busy_s=self._busy_s(),
            judging=self._judging(),
            groups=self._groups(),
            max_staleness_trained=pipeline.max_staleness_trained if pipeline else 0,
            alarms=tuple(progress.alarms),
            failure=failure,
        )
        try:
            return summary.with_objective(self._config.objective)
        except ValueError as error:
            log.warning("%s", error)
            return summary

    def _judging(self) -> JudgingSummary:
        if self._pipeline is None:
            return JudgingSummary()
        self._pipeline.tally.close_step()
        total = self._pipeline.tally.total
        return JudgingSummary(asked=total.asked, counted=total.counted, failed=total.failed, tokens=total.judge_tokens)

    def _groups(self) -> GroupsSummary:
        if self._pipeline is None:
            return GroupsSummary()
        ledger = self._pipeline.admission
        return GroupsSummary(
            submitted=ledger.submitted,
            trained=ledger.trained,
            dropped=ledger.dropped,
            in_flight=len(ledger.in_flight),
        )

    def _busy_s(self) -> dict[str, float]:
        """By role: seconds with at least one request in flight; for the learner, seconds of training calls."""
        busy: defaultdict[str, float] = defaultdict(float, self._progress.busy_before_s)
        busy["learner"] += self._progress.learner_busy_s
        if self._pipeline is not None:
            busy["policy"] += self._pipeline.playing.meter.busy_s
            if self._prepared.grm is not None:
                busy[self._prepared.grm.name] += self._pipeline.judging.meter.busy_s
        return {role: round(seconds, 3) for role, seconds in busy.items()}

    def _session_s(self) -> float:
        return time.monotonic() - self._began_s

    def _wall_s(self) -> float:
        return round(self._progress.wall_before_s + self._session_s(), 3)

    def _where(self) -> str:
        return f"files in {self._run_dir}"


async def train(prepared: Prepared, run_dir: Path, resumed: Path | None) -> Summary:
    """Run, and tell at the end what a person wants to see."""
    run_id = None
    if resumed is not None:
        run_id = RunState.from_json((resumed / "run_state.json").read_text(encoding="utf-8")).wandb_run_id
    observers = Observers.open(prepared.config, run_dir, run_id)
    run = TrainingRun(prepared, run_dir, observers, resumed)
    summary = await run.execute()
    if observers.console is not None:
        observers.console.print_samples(run._progress.rows)
        observers.console.print_files(run_dir, {n: w for n, w in FILES.items() if (run_dir / n).exists()})
    return summary
