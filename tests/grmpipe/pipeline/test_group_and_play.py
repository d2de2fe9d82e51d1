"""A group always ends with a reason; an episode is played with tokens in and tokens out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from grmpipe.config.data import RolloutConfig
from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.play import EpisodeLimits, RolloutAborted, RolloutRequest, play
from grmpipe.pipeline.group import Group, GroupState
from grmpipe.types import Failed, Prompt, RewardSpan, Rollout, Turn, Verdict
from models.engines.simulated.simulated_engine import Script, SimulatedEngine
from models.types import Completion, Message, ParsedTurn, RequestContext, SamplingParams, ToolSpec, VersionSpan

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="?"),))
LOST = Failed(stage="judge", cause="truncated", attempts=2)


def rollout(sibling: int, version: int = 0) -> Rollout:
    span = VersionSpan(model="policy", version=version, start=0, end=1)
    completion = Completion(token_ids=(1,), logprobs=(-1.0,), text="", finish_reason="stop", versions=(span,))
    return Rollout(group_id="g", sibling=sibling, turns=(Turn(new_ids=(0,), completion=completion),), status="finished")


def verdict(score: float = 5.0) -> Verdict:
    span = RewardSpan(turn=0, start=0, end=1, value=score / 10)
    return Verdict(rewards=(span,), score=score, breakdown={}, score_std=0.0, num_judgements=1)


def group(size: int = 3, rollouts: int = 3, min_valid: int = 2) -> Group:
    made = Group(group_id="g", prompt_index=0, prompt=PROMPT, size=size, min_valid_siblings=min_valid)
    for sibling in range(rollouts):
        assert made.add_rollout(rollout(sibling, version=sibling))
    return made


def test_all_verdicts_make_a_group_ready_and_its_version_is_the_lowest() -> None:
    made = group()
    for sibling in (2, 0, 1):
        assert made.state is GroupState.JUDGING
        assert made.add_verdict(sibling, verdict(sibling))
    assert made.state is GroupState.READY
    judged = made.judged()
    assert [v.score for v in judged.verdicts if isinstance(v, Verdict)] == [0, 1, 2]
    assert judged.version == 0


def test_a_failed_verdict_leaves_it_ready_and_too_many_drop_it_by_the_commonest_cause() -> None:
    partial, failed = group(), group()
    for sibling, result in enumerate((verdict(), LOST, verdict())):
        partial.add_verdict(sibling, result)
    for sibling, result in enumerate((verdict(), LOST, LOST)):
        failed.add_verdict(sibling, result)
    assert partial.state is GroupState.READY
    assert (failed.state, failed.cause) == (GroupState.DROPPED, "judge_truncated")


def test_answers_that_come_twice_or_late_or_for_nobody_are_refused() -> None:
    made = group(rollouts=2)
    assert not made.add_rollout(rollout(0))
    assert not made.add_verdict(2, verdict())
    assert made.add_verdict(0, verdict(1))
    assert not made.add_verdict(0, verdict(9))
    made.drop("rollout_died")
    assert not made.add_rollout(rollout(2))
    assert not made.add_verdict(1, verdict())
    assert made.cause == "rollout_died"


def test_at_the_deadline_a_missing_rollout_drops_the_group_and_missing_verdicts_are_timeouts() -> None:
    without_rollout, without_verdict = group(rollouts=2), group()
    without_rollout.expire()
    assert (without_rollout.state, without_rollout.cause) == (GroupState.DROPPED, "rollout_timeout")
    without_verdict.add_verdict(0, verdict())
    without_verdict.add_verdict(2, verdict())
    without_verdict.expire()
    assert without_verdict.state is GroupState.READY
    missing = without_verdict.judged().verdicts[1]
    assert isinstance(missing, Failed)
    assert missing.cause == "timeout"


def test_a_deadline_below_the_declared_speed_is_refused_with_the_key_to_type() -> None:
    with pytest.raises(ValueError, match=r"type rollout\.group_deadline_s=102\.4"):
        RolloutConfig(max_new_tokens=1024, min_tokens_per_s=10, group_deadline_s=60)


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


class Letters:
    """Renders a message as its characters' codes."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message.content)

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        return (0, *self.render(replies), 0)

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        return ParsedTurn(content=text)


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
