"""An episode is played with tokens in and tokens out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from letters import Letters

from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.play import EpisodeLimits, RolloutAborted, RolloutRequest, play
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import Message, RequestContext, SamplingParams
from grmpipe.types import Prompt, Rollout

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))


class Tape:
    """An environment with scripted replies."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.read: list[str] = []
        self.num_closed = 0

    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=episode.prompt.messages)

    async def step(self, action: Action) -> Observation:
        self.read.append(action.text)
        if not self._replies:
            return Observation(done=True)
        return Observation(messages=(Message(role="user", content=self._replies.pop(0)),))

    async def close(self) -> None:
        self.num_closed += 1


def played(env: Tape, max_turns: int, finish_reason: str = "stop") -> Rollout:
    async def go() -> Rollout:
        def author(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
            return Script(token_ids=(len(ids), params.seed), text=context.request_id, finish_reason=finish_reason)

        engine = SimulatedEngine("policy", author)
        request = RolloutRequest(group_id="g", sibling=1, seed=50)
        limits = EpisodeLimits(max_turns=max_turns)
        return await play(request, PROMPT, env, engine, Letters(), SamplingParams(max_new_tokens=4), limits)

    return asyncio.run(go())


def test_a_later_prompt_is_the_earlier_one_the_sampled_ids_and_the_reply_untouched() -> None:
    env = Tape("ab")
    result = played(env, max_turns=5)
    first = result.turns[0]
    assert first.new_ids == (ord("?"),)
    _, prompt_ids = result.prompts()
    assert prompt_ids == (*first.new_ids, *first.completion.token_ids, 0, ord("a"), ord("b"), 0)
    assert env.num_closed == 1
    assert [turn.completion.token_ids[1] for turn in result.turns] == [50, 51], "each turn has a seed of its own"
    assert env.read == ["g/1/t0", "g/1/t1"]
    assert result.status == "finished"


def test_max_tokens_and_max_turns_cut_a_rollout() -> None:
    assert played(Tape(), max_turns=1).status == "finished"
    assert played(Tape("more"), max_turns=1).status == "truncated"
    assert played(Tape(), max_turns=1, finish_reason="length").status == "truncated"


def test_an_aborted_request_is_no_rollout() -> None:
    env = Tape("more")
    with pytest.raises(RolloutAborted, match="request g/1/t0 was aborted"):
        played(env, max_turns=2, finish_reason="abort")
    assert env.read == []
