"""The flow of a GRM that is trained: its settings, and how it plays."""

from collections.abc import Callable

from grmpipe.config.grm import GrmTrainConfig
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.model_training import ModelTraining
from grmpipe.config.run_config import RunConfig
from grmpipe.envs.play import Play, Player, RolloutRequest, play_single_turn
from grmpipe.envs.retry_episode import ActingEngine, free_after, with_attempts
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.tool_grm import JudgeTools, make_limits
from grmpipe.models.chat.thinking import thinks
from grmpipe.models.types import SamplingParams
from grmpipe.pipeline.interfaces import FlowConfig
from grmpipe.roles.roles import Model
from grmpipe.run.features.cotrain.judging_tasks import NAME_IN_SEEDS
from grmpipe.types import Prompt, Rollout


def grm_flow(config: RunConfig, cotrain: GrmTrainConfig, judge: JudgeConfig, training: ModelTraining) -> FlowConfig:
    """The settings of the GRM's flow."""
    train = training.train
    return FlowConfig(
        num_steps=train.num_steps,
        groups_per_batch=train.groups_per_batch,
        group_size=train.group_size,
        min_valid_siblings=train.min_valid_siblings,
        max_staleness=train.max_staleness,
        group_deadline_s=config.rollout.group_deadline_s + judge.limits.timeout_s,
        rollout_concurrency=judge.limits.max_concurrency,
        judge_concurrency=judge.limits.max_concurrency,
        seed=config.seed,
        group_prefix=NAME_IN_SEEDS,
        rollout_max_failure_rate=config.rollout.max_failure_rate,
        pause_s=config.rollout.pause_s,
        max_zero_advantage_groups=int(cotrain.dynamic_sampling_batches * train.groups_per_batch),
        algorithm=training.algorithm,
    )


def grm_play(judge: JudgeConfig, grm: Model, engines: ActingEngine, tools: JudgeTools | None = None) -> Play:
    """One judgement of a judging task, sampled as in judging; with the judge's tools an episode."""
    renderer = grm.renderer
    params = SamplingParams(
        max_new_tokens=judge.max_new_tokens,
        temperature=judge.temperature,
        thinking=judge.make_thinking_budget(thinks=thinks(renderer.thinking)),
    )
    sampler = ReasoningEngine(engines, renderer)

    if tools is not None:
        limits, make_env = make_limits(judge, grm.context_tokens), tools.make_env
        player = Player(make_env=make_env, policy=sampler, renderer=renderer, params=params, limits=limits)
        return with_attempts(free_after(player.play, engines), attempts=1 + judge.limits.max_retries)

    async def judged(request: RolloutRequest, judging_task: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        return await play_single_turn(request, judging_task, sampler, renderer, params, on_first_token)

    return judged


def grm_too_long(judge: JudgeConfig, grm: Model) -> Callable[[Prompt], bool]:
    """A function: whether a judging task leaves no room for a critique in the GRM's window."""

    def check(judging_task: Prompt) -> bool:
        return len(grm.renderer.render(judging_task.messages)) + judge.max_new_tokens > grm.context_tokens

    return check
