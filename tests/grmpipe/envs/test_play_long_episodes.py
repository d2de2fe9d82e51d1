"""Episodes of many turns, played over several engines, are prefilled about once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.play import EpisodeLimits, RolloutRequest, play
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import Message, ParsedTurn, RequestContext, SamplingParams, ToolSpec
from grmpipe.pipeline.counters import EnvCounts
from grmpipe.scheduler.routing.router import Router
from grmpipe.types import Prompt, Rollout

TURNS = 20
PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))


class Renderer:
    """Twenty tokens before the first turn, twelve before each other one."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        return (1,) * 20

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        return (2,) * 12

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        return ParsedTurn(content=text)


class TwentyTurns:
    """An environment whose answers take a while."""

    async def open(self, episode: Episode) -> Opening:
        self._wait_s = 1e-3 * (episode.sibling % 5)
        return Opening(messages=episode.prompt.messages)

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(self._wait_s)
        done = action.turn == TURNS - 1
        return Observation(messages=() if done else PROMPT.messages, done=done)

    async def close(self) -> None:
        pass


def write(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
    """Each sibling samples other tokens."""
    return Script(token_ids=(10 + int(context.request_id.split("/")[1]),) * 8, text="x")


def prefilled_share(max_turns: int, prefix_cache: bool = True) -> float:
    """The metric of twelve episodes over three engines."""

    async def one(router: Router, sibling: int) -> Rollout:
        request = RolloutRequest(group_id="g", sibling=sibling, seed=0)
        params, limits = SamplingParams(max_new_tokens=8), EpisodeLimits(max_turns=max_turns, timed=True)
        return await play(request, PROMPT, TwentyTurns(), router, Renderer(), params, limits)

    async def main() -> float:
        names = ("policy-0", "policy-1", "policy-2")
        engines = {name: SimulatedEngine("policy", write, prefix_cache=prefix_cache) for name in names}
        router, counts = Router("policy", engines), EnvCounts()
        for rollout in await asyncio.gather(*(one(router, sibling) for sibling in range(12))):
            assert len(rollout.turns) == TURNS
            counts.rollout(rollout)
        assert counts.prefilled == sum(engine.prefilled_tokens for engine in engines.values())
        return counts.metrics()["env/prefilled_share"]

    return asyncio.run(main())


def test_twenty_turns_prefill_at_most_a_third_more_than_the_episodes_length() -> None:
    assert prefilled_share(TURNS + 1) <= 1.3
    assert prefilled_share(TURNS + 1, prefix_cache=False) > 8
