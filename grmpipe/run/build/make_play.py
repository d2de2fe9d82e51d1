"""Started components -> an episode of the policy, without its request and prompt."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

from grmpipe.envs.play import EpisodeLimits, NotAsBefore, Play, Player, RolloutRequest
from grmpipe.envs.retry_episode import ActingEngine, free_after, with_attempts
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.models.types import SamplingParams
from grmpipe.run.build.start_envs import Envs
from grmpipe.run.prepare import Prepared
from grmpipe.types import Prompt, Rollout
from grmpipe.workflows.episode_chat import EpisodeChats

log = logging.getLogger(__name__)


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
