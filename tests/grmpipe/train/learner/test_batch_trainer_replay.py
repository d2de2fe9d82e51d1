"""Replay: young groups, each once more, with their own age."""

from __future__ import annotations

from grmpipe.models.types import Completion, VersionSpan
from grmpipe.train.learner.batch_trainer import ReplayBuffer
from grmpipe.types import JudgedGroup, Prompt, Rollout, Turn


def group(name: str, version: int) -> JudgedGroup:
    spans = (VersionSpan(model="policy", version=version, start=0, end=1),)
    completion = Completion(token_ids=(1,), logprobs=(-1.0,), text="", finish_reason="stop", versions=spans)
    turn = Turn(new_ids=(1,), completion=completion)
    rollout = Rollout(group_id=name, sibling=0, turns=(turn,), status="finished")
    return JudgedGroup(group_id=name, prompt=Prompt(prompt_id=name, messages=()), rollouts=(rollout,), verdicts=())


def drawn(buffer: ReplayBuffer, version: int) -> list[str]:
    return [found.group_id for found in buffer.sample(version)]


def test_a_batch_gets_the_youngest_first_and_each_once() -> None:
    buffer = ReplayBuffer(2, max_age=9)
    buffer.keep([group("a", 0), group("b", 2), group("c", 1)])
    assert [drawn(buffer, 3) for _ in range(3)] == [["b", "c"], ["a"], []]


def test_groups_that_are_too_old_leave_the_replay_buffer() -> None:
    buffer = ReplayBuffer(9, max_age=2)
    buffer.keep([group("a", 0), group("b", 1)])
    assert drawn(buffer, 3) == ["b"]
    assert drawn(buffer, 1) == []


def test_nothing_is_kept_where_nothing_is_replayed() -> None:
    buffer = ReplayBuffer(0, max_age=9)
    buffer.keep([group("a", 0)])
    assert drawn(buffer, 0) == [] == buffer._kept


def test_newcomers_go_first() -> None:
    buffer = ReplayBuffer(1, max_age=9)
    buffer.keep([group("a", 0), group("b", 1)])
    assert drawn(buffer, 2) == ["b"]
    buffer.keep([group("c", 2)])
    assert [drawn(buffer, 3) for _ in range(3)] == [["c"], ["a"], []]
