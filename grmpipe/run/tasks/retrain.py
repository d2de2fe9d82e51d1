"""Trains a recorded run again: its batches in its order, with only the learner.

    rollouts.jsonl, judgements.jsonl, groups.jsonl -> batch of step n -> train: take .. take, step -> step n + 1

The same configuration gives bit-identical weights; another algorithm trains on the same data.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.train import TrainConfig
from grmpipe.data.demonstrations import Demonstrations
from grmpipe.judge.kinds.labels import find_rule
from grmpipe.observe.all_trackers import JsonlSink, is_up_to
from grmpipe.observe.journal import read_journal, replace_journal
from grmpipe.observe.recorder import GROUPS, TRAINED
from grmpipe.observe.summary import GroupsSummary, Status, Summary
from grmpipe.pipeline.interfaces import PipelineState, RolloutKey
from grmpipe.pipeline.step_metrics import batch_metrics, check_truth, describe_trained, truth_metrics, with_pace
from grmpipe.roles.find_models import find_model
from grmpipe.roles.learners import check_divides, check_learns
from grmpipe.roles.machines import check_machine, check_shared
from grmpipe.roles.role_placement import check_slots
from grmpipe.roles.roles import Model, Roles, resolve_roles
from grmpipe.run.build.start_cluster import start_cluster
from grmpipe.run.build.start_models import learner_spec, name_learner
from grmpipe.run.export import export
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.run_prompts import read_demonstrations
from grmpipe.run.signals import ENDS_WITH_CHECKPOINT, stop_by_signals
from grmpipe.run_dir.checkpoints import CheckpointWriter
from grmpipe.run_dir.identity import check_is_there, read_run_id
from grmpipe.run_dir.recorded_run import RecordedRun, open_recorded
from grmpipe.run_dir.run_state import RunState
from grmpipe.scheduler.placement import Placement, place
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.make_learner import make_learner
from grmpipe.types import JudgedGroup, Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRetraining:
    """A checked retraining, ready to start."""

    config: RunConfig
    policy: Model
    placement: Placement
    roles: Roles
    recorded: RecordedRun
    demonstrations: Demonstrations | None = None  # that the policy imitates


def prepare_retraining(config: RunConfig) -> PreparedRetraining:
    """Assign the learner's slots, open the recorded run, find the policy, and check that they fit each other."""
    with section(""):
        placement = place(config.placement.without_time_sharing(), config.roles, config.served, config.learners)
        roles = resolve_roles(config, placement)
    check_slots(learner := roles.learners["learner"])
    learner.check_ranks()
    check_machine(config.cluster, placement)
    assert config.data.retrain_from is not None
    with section("data.retrain_from: "):
        recorded = open_recorded(Path(config.data.retrain_from))
    check_sizes(config.train, recorded)
    policy = find_model(roles.served["policy"], config.cluster)
    check_learns(policy, "policy")
    check_divides(learner, "policy", policy.path)
    check_tokens(policy, config.policy.path, recorded)
    return PreparedRetraining(
        config=config,
        policy=policy,
        placement=placement,
        roles=roles,
        recorded=recorded,
        demonstrations=read_demonstrations(config.algorithm.sft.path, policy.renderer, config.seed),
    )


def check_sizes(train: TrainConfig, recorded: RecordedRun) -> None:
    for key, wanted, held in (
        ("group_size", train.group_size, recorded.group_size),
        ("groups_per_batch", train.groups_per_batch, recorded.groups_per_batch),
    ):
        if wanted != held:
            raise ConfigError(f"train.{key}: {wanted}, but {recorded.rollouts} has {held}; type train.{key}={held}")
    if recorded.max_staleness > train.max_staleness:
        raise ConfigError(
            f"train.max_staleness: {train.max_staleness}, but {recorded.rollouts} has groups that were trained "
            f"{recorded.max_staleness} versions old; type train.max_staleness={recorded.max_staleness}"
        )


def check_tokens(policy: Model, policy_path: str, recorded: RecordedRun) -> None:
    """Check that the recorded ids are this model's, by re-rendering the prompts of the first batch."""
    with section("data.retrain_from: "):
        first = recorded.batch(1)
    for group in first:
        rollout = group.rollouts[0]
        sent = rollout.turns[0].new_ids
        sampled = [i for one in group.rollouts for turn in one.turns for i in turn.completion.token_ids]
        in_env = rollout.took_s > 0  # which may have shown tools, or other messages
        if max(*sent, *sampled) >= policy.renderer.vocab_size or (
            not in_env and policy.renderer.render(group.prompt.messages) != sent
        ):
            raise ConfigError(
                f"policy.path: the tokenizer or the chat template of {policy_path} differs from that of "
                f"{recorded.rollouts}: the ids of prompt {group.prompt.prompt_id} differ; give the policy that "
                "the recorded run started from"
            )


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
        # Its weights aren't sent anywhere.
        spec = learner_spec(self._config, prepared.roles, prepared.policy, "object_store", self._run_dir)
        learner_role = name_learner(prepared.roles.served[prepared.policy.name])
        ranks = await cluster.start_members(learner_role, functools.partial(make_learner, spec))
        learner = LearnerRanks(ranks, spec.train.parallel.cp)
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
