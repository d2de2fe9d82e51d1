"""Composes the policy's pipeline: every part with its wrappers, from the inside out.

play:         the episode                   <- its end becomes a judging task          (a GRM in training)
trainer:      batches on the learner        <- has its device for the step             (time-shared pool)
                                            <- waits for the GRM's steps               (a GRM in training)
push_weights: to the living engines         <- ends the learner's phase                (time-shared pool)
journal:      the run's files               <- a finished rollout asks for its values  (critic)
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from grmpipe.config.run_config import RunConfig
from grmpipe.data.demonstrations import Demonstrations
from grmpipe.envs.episode_slots import EpisodeSlots
from grmpipe.envs.play import Play
from grmpipe.judge.teaching import Teacher, TeachingJudge
from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.pipeline.health import VERDICTS_WINDOW, JudgeHealth, ServiceHealth
from grmpipe.pipeline.interfaces import GroupJournal, PipelineComponents, Prompts, Trainer
from grmpipe.run.build.make_play import make_play
from grmpipe.run.build.start import Running
from grmpipe.run.features.cotrain.cotraining import CoTrainings
from grmpipe.run.observers import Observers
from grmpipe.run.prepare import Prepared
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.slots.time_share import TimeShare
from grmpipe.scheduler.weights.weight_push import SyncReport
from grmpipe.train.critic.critic import Critic
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.time_shared_learner import TimeSharedTrainer, begin_learner_phase
from grmpipe.types import Judge, Prompt

PushWeights = Callable[[int], Awaitable[SyncReport]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """The trainers of the policy, and the push of its weights to its living engines.

    critic:     for estimators that need values, or None.
    share:      the time-shared pool of learner and engines, or None.
    cotrainings: the flows of the GRMs that are trained.
    """

    policy: LearnerRanks
    push: PushWeights
    critic: Critic | None = None
    share: TimeShare | None = None
    cotrainings: CoTrainings = field(default_factory=CoTrainings)


def compose(
    config: RunConfig,
    learners: Learners,
    *,
    prompts: Prompts,
    too_long: Callable[[Prompt], bool],
    play: Play,
    slots: EpisodeSlots,
    judge: Judge,
    teachers: Mapping[str, Teacher],
    journal: GroupJournal,
    events: EventSink,
    demonstrations: Demonstrations | None = None,
) -> PipelineComponents:
    """The components of the policy's pipeline, in a real run and in a simulated one. teachers: by name."""
    critic = learners.critic
    return PipelineComponents(
        prompts=prompts,
        too_long=too_long,
        play=learners.cotrainings.record(play),
        judge=compose_teaching(config, judge, teachers),
        judge_guard=JudgeHealth(compose_health(config), compose_teaching_health(config)),
        trainer=compose_trainer(config, learners, demonstrations),
        push_weights=compose_push(learners.push, learners.share),
        journal=journal,
        events=events,
        slots=slots,
        valuer=None if critic is None else critic.value_cache,
    )


def compose_health(config: RunConfig) -> ServiceHealth:
    """The health of the judge, by the verdicts that are trained on, with the settings of the main judge."""
    judge = config.main_judge
    return ServiceHealth(
        "judging",
        max_failure_rate=judge.max_failure_rate,
        window=VERDICTS_WINDOW,
        pause_s=config.rollout.pause_s,
        counted="verdicts",
        key=f"{judge.key}.max_failure_rate",
    )


def compose_teaching(config: RunConfig, judge: Judge, teachers: Mapping[str, Teacher]) -> Judge:
    """The judge, beside which teachers score the rollouts on the prompts of their sources."""
    distill = config.algorithm.distill
    if not teachers:
        return judge

    def find(source: str) -> Teacher | None:
        name = distill.find_teacher(source)
        return None if name is None else teachers[name]

    places = PrioritySemaphore(max(1, config.judging.max_concurrency))
    return TeachingJudge(judge=judge, find_teacher=find, places=places, required=distill.required)


def compose_teaching_health(config: RunConfig) -> ServiceHealth | None:
    """The health of the teachers, by their scores; None without any."""
    if not config.teachers:
        return None
    judge = config.main_judge
    return ServiceHealth(
        "judging",
        max_failure_rate=judge.max_failure_rate,
        window=VERDICTS_WINDOW,
        pause_s=config.rollout.pause_s,
        counted="scores of teachers",
        key=f"{judge.key}.max_failure_rate",
    )


def compose_trainer(config: RunConfig, learners: Learners, demonstrations: Demonstrations | None) -> Trainer:
    trainer: Trainer = BatchTrainer(
        learners.policy,
        config.train,
        config.algorithm,
        config.rollout.max_new_tokens,
        learners.critic,
        config.seed,
        mask_truncated=config.rollout.truncated == "mask",
        demonstrations=demonstrations,
    )
    if learners.share is not None:
        trainer = TimeSharedTrainer(trainer, begin_learner_phase(learners.share))
    return learners.cotrainings.in_lockstep(trainer)


def compose_push(push: PushWeights, share: TimeShare | None) -> PushWeights:
    """A push of the policy's weights, which in a time-shared pool ends the learner's phase."""
    return push if share is None else lambda version: share.push(lambda: push(version))


def make_components(
    prepared: Prepared, running: Running, observers: Observers, cotrainings: CoTrainings
) -> PipelineComponents:
    """The components of the policy's pipeline."""
    learners = Learners(
        policy=running.policy.learner,
        push=running.policy.push,
        critic=running.critic,
        share=running.maintenance.share,
        cotrainings=cotrainings,
    )
    play = make_play(prepared, running.policy.router, running.envs, prepared.config.rollout.temperature)
    return compose(
        prepared.config,
        learners,
        prompts=prepared.prompts,
        too_long=too_long(prepared),
        # An episode of one turn never goes on: no turn of it stands on file before its end.
        play=play if prepared.config.env.env_kind.is_single else observers.begun.resume(play),
        slots=running.envs.slots,
        judge=running.judge,
        teachers=running.teachers,
        journal=observers.recorder,
        events=observers.timeline,
        demonstrations=prepared.demonstrations,
    )


def too_long(prepared: Prepared) -> Callable[[Prompt], bool]:
    """A function: whether a prompt leaves no room for an answer in the policy's context window."""
    policy, max_new_tokens = prepared.policy, prepared.config.rollout.max_new_tokens

    def check(prompt: Prompt) -> bool:
        return len(policy.renderer.render(prompt.messages)) + max_new_tokens > policy.context_tokens

    return check
