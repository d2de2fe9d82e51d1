"""A group always ends with a reason."""

from __future__ import annotations

from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.pipeline.group import Group, GroupState
from grmpipe.types import Failed, Prompt, RewardSpan, Rollout, Turn, Verdict

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
    judged = made.to_judged_group()
    assert [v.score for v in judged.verdicts if isinstance(v, Verdict)] == [0, 1, 2]
    assert judged.version == 0


def test_what_is_said_of_parts_goes_with_its_verdict() -> None:
    made = group(size=2, rollouts=2)
    made.add_verdict(0, verdict(), {"judge": {"short": 1.0}})
    made.void_verdicts()
    made.add_verdict(0, verdict(), {"judge": {"short": 0.5}})
    made.add_verdict(1, verdict())
    assert made.to_judged_group().by_part == ({"judge": {"short": 0.5}}, {})


def test_a_failed_verdict_leaves_it_ready_and_too_many_drop_it_by_the_commonest_cause() -> None:
    partial, failed = group(), group()
    for sibling, result in enumerate((verdict(), LOST, verdict())):
        partial.add_verdict(sibling, result)
    for sibling, result in enumerate((verdict(), LOST, LOST)):
        failed.add_verdict(sibling, result)
    assert partial.state is GroupState.READY
    assert (failed.state, failed.cause) == (GroupState.DROPPED, "judge_truncated")


def test_group_refuses_answers_that_are_late_doubled_or_without_a_rollout() -> None:
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
    missing = without_verdict.to_judged_group().verdicts[1]
    assert isinstance(missing, Failed)
    assert missing.cause == "timeout"
