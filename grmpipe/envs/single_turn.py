"""The environment of one question and one answer."""

from collections.abc import Callable

from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.play import EpisodeLimits, RolloutRequest, TurnRenderer, play
from grmpipe.models.types import Generates, SamplingParams, ignore_first_token
from grmpipe.types import Prompt, Rollout

ONE_TURN = EpisodeLimits(max_turns=1)


class SingleTurn:
    """Shows the prompt's messages; the policy's first turn ends the episode."""

    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=episode.prompt.messages)

    async def step(self, action: Action) -> Observation:
        return Observation(done=True)

    async def close(self) -> None:
        """It holds nothing."""


async def play_single_turn(
    request: RolloutRequest,
    prompt: Prompt,
    policy: Generates,
    renderer: TurnRenderer,
    params: SamplingParams,
    on_first_token: Callable[[], None] = ignore_first_token,
) -> Rollout:
    """Play a rollout of one turn, whatever the environment of the run is. Raises as `play` does."""
    return await play(request, prompt, SingleTurn(), policy, renderer, params, ONE_TURN, on_first_token)
