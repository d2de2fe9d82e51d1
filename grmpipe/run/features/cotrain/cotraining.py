"""A GRM trained next to the policy: its flow is a second pipeline, whose policy is the judge of the first.

    policy's flow:  prompts -> play -> judge -> train -> push to the policy's engines
                                |        ^
     (own rollouts, labels by a judge)   |  a new version: judge tasks are aborted, incomplete groups judged again
                                v        |
    GRM's flow:     judging tasks -> judge -> rule -> train -> push to the GRM's engines

Owns neither flow: it connects the two, and keeps them in step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from grmpipe.config.model_training import find_training
from grmpipe.envs.play import Play, RolloutRequest
from grmpipe.judge.kinds.labels import JudgingTasks, LabelReward
from grmpipe.judge.kinds.rule import rule_named
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.observe.guard import Guard
from grmpipe.observe.recorder import Recorder
from grmpipe.pipeline.consumer import Interrupted
from grmpipe.pipeline.interfaces import PipelineComponents, PipelineState, StepReport, TrainedBatch, Trainer
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.step_metrics import batch_metrics, describe_trained, with_pace
from grmpipe.run.features.cotrain.judging_tasks import JudgingTaskStream, grm_flow, grm_play, grm_too_long
from grmpipe.run.features.cotrain.label_source import LabelSource
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_model import RunModel
from grmpipe.run_dir.identity import read_run_id
from grmpipe.run_dir.recovery import void_steps_after
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.run_together import run_until
from grmpipe.scheduler.slots.engine_replacement import RoleHealth
from grmpipe.scheduler.weights.weight_push import SyncReport
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.types import JudgedGroup, JudgeReport, Metrics, Prompt, Rollout

FOLDER = "cotrain"  # for the judging tasks' journals
ROLLOUT_WINDOW = 256  # latest right and latest wrong rollouts to sample from, this many of each
T = TypeVar("T")


class StepPacer:
    """The pace of two learners. The GRM makes `warmup_steps` alone; then `grm_steps_per_policy_step` of its steps
    belong to each step of the policy.

    While the policy makes its step v + 1, the GRM may make the steps that belong to it; the policy waits for those that
    belong to v. So they overlap, and neither runs ahead of the other.
    """

    def __init__(self, *, warmup_steps: int, grm_steps_per_policy_step: float) -> None:
        self.policy_version = 0
        self.grm_version = 0
        self._warmup_steps = warmup_steps
        self._rate = grm_steps_per_policy_step
        self._skipped = 0
        self._moved = asyncio.Event()

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over, so that the GRM may judge for the policy."""
        return self.grm_version >= self._warmup_steps

    @property
    def policy_may_step(self) -> bool:
        """Whether the GRM has made the steps that the policy's next one waits for."""
        return self.grm_version + self._skipped >= self.grm_steps_with(self.policy_version)

    def grm_steps_with(self, policy_version: int) -> int:
        """The number of GRM steps that belong to the first `policy_version` steps of the policy."""
        return self._warmup_steps + math.floor(self._rate * policy_version + 1e-9)

    def skip_due(self) -> None:
        """Let the policy go on without the steps that are due: the GRM had nothing to learn from. They aren't made up
        for.
        """
        self._skipped = max(self._skipped, self.grm_steps_with(self.policy_version) - self.grm_version)

    def policy_stepped(self, version: int) -> None:
        self.policy_version = version
        self._moved.set()

    def grm_stepped(self, version: int) -> None:
        self.grm_version = version
        self._moved.set()

    async def until_policy_may_step(self) -> None:
        while not self.policy_may_step:
            await self._until_moved()

    async def until_grm_may_step(self) -> None:
        while self.grm_version + self._skipped >= self.grm_steps_with(self.policy_version + 1):
            await self._until_moved()

    async def until_warm(self) -> None:
        while not self.is_warm:
            await self._until_moved()

    async def _until_moved(self) -> None:
        """Wait for a step of either learner. All waiters check their condition again."""
        moved = self._moved
        await moved.wait()
        if self._moved is moved:
            self._moved = asyncio.Event()


class CoTraining:
    """The GRM's training in a run of the policy. Compose the policy's pipeline with it, then run both by
    `run_alongside`.
    """

    def __init__(
        self,
        prepared: Prepared,
        grm: RunModel,
        run_dir: Path,
        events: EventSink,
        health: Sequence[RoleHealth],
        pipeline_state: PipelineState | None,
        kept: Sequence[tuple[Prompt, Rollout]],
        guard: Guard,
    ) -> None:
        """health: of all engines. pipeline_state: state to continue from; the learner is loaded already. kept: the
        policy's rollouts that a resume found. guard: shared by all journals of the run.
        """
        config, role = prepared.config, grm.name
        self.role, self.learner_role = role, grm.learner_role
        self.learner_busy_s = 0.0
        self._cotrain, self._judge = config.trained_grms[role], config.judging.find_training_judge(role)
        self._training = find_training(config, role)
        self._health = health
        self._config = config
        self._grm = grm
        # Its judging tasks in flight are void: they were the run's own rollouts, and there are newer ones.
        self._pipeline_state = dataclasses.replace(
            pipeline_state or PipelineState(), version=grm.learner.version, in_flight={}
        )
        self._events = events
        folder, run_id = run_dir / FOLDER / role, read_run_id(run_dir)
        void_steps_after(folder, self._pipeline_state.version, {}, run_id)  # they are made again
        self._recorder = Recorder(folder, run_id, compact=config.journals.compact, guard=guard)
        self._pacer = StepPacer(
            warmup_steps=self._cotrain.warmup_steps,
            grm_steps_per_policy_step=self._cotrain.grm_steps_per_policy_step,
        )
        self._pacer.grm_stepped(self._pipeline_state.version)
        self._judging_tasks = make_judging_tasks(prepared, role)
        for prompt, rollout in kept:
            self._add(prompt, rollout)
        self._labels = LabelSource(prepared, role, run_dir, self._judging_tasks, guard)
        if pipeline_state is not None:
            self._labels.restore(run_dir, run_id)
        self._judging_version = self._pipeline_state.version  # its engines'
        self._flow: Pipeline | None = None
        self._metrics: Metrics = {}

    @property
    def version(self) -> int:
        """The version of the GRM that judges: its completed optimizer steps."""
        return self._flow.version if self._flow is not None else self._pipeline_state.version

    def record(self, play: Play) -> Play:
        """The policy's episodes, whose ends become judging tasks."""

        async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
            rollout = await play(request, prompt, on_first_token)
            self._add(prompt, rollout)
            return rollout

        return played

    def _add(self, prompt: Prompt, rollout: Rollout) -> None:
        """Add a judging task, if the GRM may be asked about the prompt: not on prompts that a route sends elsewhere."""
        if self._config.may_ask(self.role, prompt.source):
            self._judging_tasks.add(prompt, rollout)

    def in_lockstep(self, trainer: Trainer) -> Trainer:
        """The policy's trainer, whose steps wait for the GRM's steps that are due before them."""
        return LockstepTrainer(trainer, self._pacer, self._labels)

    async def push(self, version: int) -> SyncReport:
        """Push the GRM's weights to all its living engines, with confirmation: it judges by them."""
        self._judging_version = version
        self._labels.refit()
        return await self._grm.push(version)

    async def run_alongside(self, policy: Pipeline, work: Callable[[], Awaitable[T]]) -> T:
        """Run the GRM's flow until `work`, which runs the policy's, ends. Both are then between two steps."""
        self._pacer.policy_stepped(policy.version)
        self._labels.read_file()
        if self._cotrain.labels_from is not None and self._pacer.is_warm:
            self._pacer.skip_due()  # those that weren't made before the checkpoint had nothing to learn from
        self._flow = flow = self._make_flow(policy)
        ended = asyncio.Event()

        async def learn() -> None:
            try:
                await flow.run()
            except Interrupted:
                await self._grm.learner.discard()
            finally:
                ended.set()

        async def judge_for_the_policy() -> T:
            try:
                return await work()
            finally:
                flow.interrupt()
                await ended.wait()

        try:
            return await run_until(judge_for_the_policy(), learn=learn(), warm_up=self._warm_up(policy))
        finally:
            self._recorder.close()
            self._labels.close()

    def after_policy_step(self, version: int) -> Metrics:
        """Call after each step of the policy. Returns further metrics of the step."""
        self._pacer.policy_stepped(version)
        self._labels.read_file()
        return {**self._metrics, f"{self.role}/version": float(self.version)}

    async def begin_save(self, checkpoint: Path, *, in_background: bool) -> PipelineState:
        """Save the GRM's learner, and return the state of its flow, between two of its steps."""
        flow = self._flow
        async with self._grm.learner.held() as version:
            await self._grm.begin_save(checkpoint, in_background=in_background)
            return dataclasses.replace(
                flow.state() if flow is not None else self._pipeline_state, version=version, in_flight={}
            )

    async def _warm_up(self, policy: Pipeline) -> None:
        """Train the GRM before it judges: the policy rolls out meanwhile, and nothing is judged for it."""
        with policy.hold_judging():
            await self._pacer.until_warm()

    def _rollouts_may_come(self, policy: Pipeline) -> bool:
        """Whether the policy may get further rollouts before the GRM's next step, or needs none. Of labels from others
        some may always come: without any the policy goes on.
        """
        if self._cotrain.labels_from is not None:
            return True
        if not self._pacer.is_warm:
            return not policy.is_rolled_out
        is_over = policy.version >= self._config.train.num_steps
        return is_over or self._pacer.policy_may_step or not policy.is_settled

    def _make_flow(self, policy: Pipeline) -> Pipeline:
        config, judge = self._config, self._judge
        parts = PipelineComponents(
            prompts=self._judging_tasks,
            too_long=grm_too_long(judge, self._grm.files),
            play=grm_play(judge, self._grm.files, self._grm.router, self._grm.tools.get(judge.name)),
            judge=PointwiseAdapter(LabelReward(judge)),
            judge_guard=GrmStepGate(self._pacer, self._judging_tasks, lambda: self._rollouts_may_come(policy)),
            trainer=BatchTrainer(self._grm.learner, self._training.train, self._training.algorithm),
            push_weights=lambda version: policy.change_judge(
                version - self._judging_version, lambda: self.push(version)
            ),
            journal=self._recorder,
            events=GrmLanes(self._events, self.role),
        )
        flow = Pipeline(
            parts, grm_flow(config, self._cotrain, judge, self._training), self._after_step, self._pipeline_state
        )
        for health in self._health:
            health.clocks.add(flow.clock)
        return flow

    async def _after_step(self, report: StepReport) -> None:
        self.learner_busy_s += report.learner_busy_s
        self._pacer.grm_stepped(report.step)
        trained = describe_trained(report.step, report.groups, report.advantages, {}, report.times)
        self._recorder.record_training(trained)
        paced = with_pace(report.learner, report.learner_busy_s)
        learnt = {name.removeprefix("train/"): value for name, value in paced.items()}
        batch = batch_metrics(report.groups, report.step - 1, self._training.algorithm)
        learnt |= {
            "right_share": (1 + batch["train/reward"]) / 2,
            "zero_advantage_share": batch["train/zero_advantage_share"],
            "step_s": report.stalls.steps_s,
            "push_s": report.sync.seconds,
        }
        self._metrics = {f"{self.role}/{name}": value for name, value in learnt.items()}


class CoTrainings(RunFeature):
    """The trained GRMs of a run, each with a flow, a learner and a version of its own. There may be none."""

    def __init__(self, each: Sequence[CoTraining] = ()) -> None:
        self._each = tuple(each)

    def __bool__(self) -> bool:
        return bool(self._each)

    @property
    def version(self) -> int:
        """The version of the judging: the optimizer steps of all of them."""
        return sum(self.versions.values())

    @property
    def versions(self) -> dict[str, int]:
        """Role -> completed optimizer steps."""
        return {one.role: one.version for one in self._each}

    @property
    def learner_busy_s(self) -> dict[str, float]:
        """Role of a learner -> seconds in its calls."""
        return {one.learner_role: one.learner_busy_s for one in self._each}

    def record(self, play: Play) -> Play:
        """The policy's episodes, whose ends become judging tasks of each GRM."""
        return functools.reduce(lambda played, one: one.record(played), self._each, play)

    def in_lockstep(self, trainer: Trainer) -> Trainer:
        """The policy's trainer, whose steps wait for the GRMs' steps that are due before them."""
        return functools.reduce(lambda paced, one: one.in_lockstep(paced), self._each, trainer)

    async def push(self) -> None:
        """Push the weights of every GRM to its engines, before the first step."""
        for one in self._each:
            await one.push(one.version)

    async def run_alongside(self, policy: Pipeline, work: Callable[[], Awaitable[T]]) -> T:
        """Run the flows of the GRMs until `work`, which runs the policy's, ends. All are then between two steps."""
        for one in self._each:
            work = functools.partial(one.run_alongside, policy, work)
        return await work()

    async def after_step(self, end: StepEnd) -> Metrics:
        return {name: value for one in self._each for name, value in one.after_policy_step(end.step).items()}

    async def begin_save(self, checkpoint: Path, *, in_background: bool) -> dict[str, PipelineState]:
        """Save the learners. Role -> the state of its flow, between two of its steps."""
        return {one.role: await one.begin_save(checkpoint, in_background=in_background) for one in self._each}


def make_judging_tasks(prepared: Prepared, role: str) -> JudgingTaskStream:
    """The judging tasks of a model that learns to judge. role: its own."""
    config = prepared.config
    own = config.trained_grms.get(role)
    pass_reward = config.main_judge.scale.to_reward(config.data.labels.pass_score)
    return JudgingTaskStream(
        JudgingTasks.under(config.judging.find_training_judge(role), config.data.labels),
        rule_named(config.truth.rule) if own is None or own.labels_from is None else None,
        prepared.judging_tasks[role],
        # The policy learns either from stored tasks or, without any, from its rollouts.
        rollout_share=own.rollout_share if own is not None else 0.0,
        window=ROLLOUT_WINDOW,
        seed=config.seed,
        pass_reward=pass_reward if 0 < pass_reward <= 1 else 1.0,
        key=f"{config.models[role].key}.train" if own is not None else "algorithm.self_judging",
    )


@dataclass(frozen=True, slots=True)
class LockstepTrainer:
    """The policy's trainer, which waits for the GRM's steps that are due before its own."""

    trainer: Trainer
    pacer: StepPacer
    labels: LabelSource

    async def take(self, group: JudgedGroup) -> None:
        self.labels.take(group)
        await self.trainer.take(group)

    async def while_waiting(self) -> bool:
        return await self.trainer.while_waiting()

    async def step(self, batch: Sequence[JudgedGroup]) -> TrainedBatch:
        if self.labels.are_missing and self.pacer.is_warm:
            self.pacer.skip_due()
        await self.pacer.until_policy_may_step()
        return await self.trainer.step(batch)

    async def discard(self) -> None:
        await self.trainer.discard()


@dataclass(frozen=True, slots=True)
class GrmStepGate:
    """Admits judging tasks when the GRM may step. The rule that judges is always fit."""

    pacer: StepPacer
    judging_tasks: JudgingTaskStream
    may_come: Callable[[], bool]  # whether further rollouts may come before the GRM's next step

    def verdict(self, report: JudgeReport) -> None:
        return None

    async def until_fit(self, clock: ActiveClock) -> None:
        with clock.pause():
            await self.judging_tasks.until_usable(may_come=self.may_come, warm=lambda: self.pacer.is_warm)
            await self.pacer.until_grm_may_step()


@dataclass(frozen=True, slots=True)
class GrmLanes:
    """Puts events of a GRM's learner and weight sync on their own lanes."""

    events: EventSink
    role: str

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        self.events.span(f"{self.role} {lane}", name, start_s, end_s, **args)
