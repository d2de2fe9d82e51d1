"""Composes the policy's pipeline: every part with its wrappers, from the inside out.

play:         the episode                   <- its end becomes a judging task          (a GRM in training)
trainer:      batches on the learner        <- has its device for the step             (time-shared pool)
                                            <- waits for the GRM's steps               (a GRM in training)
push_weights: to the living engines         <- ends the learner's phase                (time-shared pool)
journal:      the run's files               <- a finished rollout asks for its values  (critic)
"""

import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from grmpipe.config.run_config import RunConfig
from grmpipe.config.task_settings import EvaluateConfig
from grmpipe.data.demonstrations import Demonstrations
from grmpipe.envs.episode_slots import EpisodeSlots, in_own_slot
from grmpipe.envs.play import EpisodeLimits, NotAsBefore, Play, Player, RolloutRequest
from grmpipe.envs.retry_episode import ActingEngine, free_after, with_attempts
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.evaluation.held_out import Evaluator
from grmpipe.evaluation.sampled_answers import AnswerSampling
from grmpipe.judge.composition.composed_judge import get_members, get_skill, with_own_bounds
from grmpipe.judge.teaching import Teacher, TeachingJudge
from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.models.types import SamplingParams
from grmpipe.observe.progress import Progress
from grmpipe.pipeline.health import VERDICTS_WINDOW, JudgeHealth, ServiceHealth
from grmpipe.pipeline.interfaces import GroupJournal, PipelineComponents, Prompts, Trainer
from grmpipe.run.build.start import Running
from grmpipe.run.build.start_envs import Envs
from grmpipe.run.features.cotrain.cotraining import CoTrainings
from grmpipe.run.observers import Observers
from grmpipe.run.prepare import Prepared
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.slots.time_share import TimeShare
from grmpipe.scheduler.weights.weight_push import SyncReport
from grmpipe.train.critic.critic import Critic
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.time_shared_learner import TimeSharedTrainer, begin_learner_phase
from grmpipe.types import Judge, Prompt, Rollout
from grmpipe.workflows.episode_chat import EpisodeChats

log = logging.getLogger(__name__)

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
        judge_guard=JudgeHealth(
            compose_health(config), compose_health(config, "scores of teachers") if config.teachers else None
        ),
        trainer=compose_trainer(config, learners, demonstrations),
        push_weights=compose_push(learners.push, learners.share),
        journal=journal,
        events=events,
        slots=slots,
        valuer=None if critic is None else critic.value_cache,
    )


def compose_health(config: RunConfig, counted: str = "verdicts") -> ServiceHealth:
    """The health of the judge, by the verdicts that are trained on, with the settings of the main judge. counted: what
    else is, such as the scores of teachers.
    """
    judge = config.main_judge
    return ServiceHealth(
        "judging",
        max_failure_rate=judge.max_failure_rate,
        window=VERDICTS_WINDOW,
        pause_s=config.rollout.pause_s,
        counted=counted,
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


# -- evaluations on held-out prompts -----------------------------------------------------------------------------------


def make_evaluator(prepared: Prepared, running: Running, progress: Progress) -> Evaluator:
    """The evaluations of a run that trains."""
    config, judge = prepared.config, running.judge
    sampling = read_sampling(config.evaluate, default=1)
    return replace(
        evaluator_on(take_sources_in_turn(prepared.held_out), prepared, running, with_own_bounds(judge), sampling),
        first=first_of_all_answers(config, judge, prepared.held_out),
        pass_reward=compute_pass_reward(config),
        by_model=config.judging.by_model,
        compares=config.judging.compares,
        skill=get_skill(judge),
        progress=progress,
    )


def take_sources_in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, one of each source after the other: the first ones, which are the anchors, are of all sources."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    return [prompt for turn in itertools.zip_longest(*by_source.values()) for prompt in turn if prompt is not None]


def evaluator_on(
    prompts: Sequence[Prompt], prepared: Prepared, running: Running, judge: Judge, sampling: AnswerSampling
) -> Evaluator:
    """The evaluation of the policy on prompts."""
    config, clock, envs = prepared.config, ActiveClock(), running.envs
    running.maintenance.stops(clock)
    play = functools.partial(make_play, prepared, running.policy.router, envs)
    return Evaluator(
        prompts=prompts,
        play_sampled=in_own_slot(play(config.evaluate.temperature), envs.slots),
        play_greedy=in_own_slot(play(0.0), envs.slots),
        judge=judge,
        is_right=prepared.is_right,
        seed=config.seed,
        counting=sampling,
        greedy=config.evaluate.greedy,
        deadline_s=config.rollout.group_deadline_s,
        clock=clock,
        make_health=functools.partial(compose_health, config),
    )


def read_sampling(evaluate: EvaluateConfig, default: int) -> AnswerSampling:
    """How many answers to a prompt are sampled, and each k of pass@k. default: answers, if neither is set."""
    num_samples = evaluate.samples(default)
    return AnswerSampling(num_samples=num_samples, pass_k=evaluate.pass_ks(num_samples))


def first_of_all_answers(config: RunConfig, judge: Judge, prompts: Sequence[Prompt]) -> str | None:
    """The first of several judges, if it judges every answer to the prompts. None if it compares, or if other verdicts
    decide what it sees: its scores would then be of a part of the answers, which changes as the policy learns.
    """
    name, sources = config.judging.main, {prompt.source for prompt in prompts}
    sees_all = all(name in config.rewards.always_asked(source) for source in sources)
    compares = name in config.judging.generative and config.main_judge.protocol_kind.compares
    return name if name in get_members(judge) and sees_all and not compares else None


def compute_pass_reward(config: RunConfig) -> float | None:
    """The lowest reward with which a judge passes an answer, whatever its scale. None if `data.labels.pass_score`
    isn't on the first judge's, or that has none.
    """
    if not config.main_judge.has_scale:
        return None
    scale, pass_score = config.main_judge.scale, config.data.labels.pass_score
    return scale.to_reward(pass_score) if scale.low < pass_score <= scale.high else None


# -- an episode of the policy, without its request and prompt ----------------------------------------------------------


def make_play(prepared: Prepared, engines: ActingEngine, envs: Envs, temperature: float) -> Play:
    """An episode without its request and prompt."""
    rollout, env = prepared.config.rollout, prepared.config.env
    sampler, renderer = ReasoningEngine(engines, prepared.policy.renderer), prepared.policy.renderer
    params = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=temperature,
        stop=tuple(rollout.stop),
        thinking=rollout.make_thinking_budget(),
    )
    limits = EpisodeLimits(
        max_turns=rollout.max_turns,
        context_tokens=prepared.policy.context_tokens,
        episode_s=env.episode_s,
        timed=not env.env_kind.is_single,
        keeps_state=any(judge.tools.state for judge in prepared.config.asked.judges.values()),
    )

    if (workflow := envs.workflow) is not None:
        chats = EpisodeChats(sampler, renderer, params, limits, envs.events)
        asked = free_after(functools.partial(workflow.play, chats), engines)
        return with_attempts(asked, attempts=env.attempts)
    make = envs.make
    assert make is not None, "an episode without a workflow has an environment"

    player = Player(make_env=make, policy=sampler, renderer=renderer, params=params, limits=limits)
    if env.env_kind.is_single:
        return player.play
    return with_attempts(free_after(from_start_if_changed(player.play), engines), attempts=env.attempts)


def from_start_if_changed(play: Play) -> Play:
    """A play from the start, by the same seed, if the environment isn't where it was before a resume."""

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        try:
            return await play(request, prompt, on_first_token)
        except NotAsBefore as change:
            log.warning("episode %s/%d is played from its start: %s", request.group_id, request.sibling, change)
        return await play(replace(request, begun=None), prompt, on_first_token)

    return played
