"""What is known of a batch's rollouts once it is trained. Pure."""

from collections.abc import Mapping, Sequence

from grmpipe.judge.kinds.rule import Rule
from grmpipe.judge.verdict import get_reward
from grmpipe.pipeline.interfaces import RolloutKey, RolloutTimes
from grmpipe.types import Failed, JudgedGroup, TrainedRollout, Verdict

DECIMALS_S = 3


def check_truth(groups: Sequence[JudgedGroup], is_right: Rule) -> dict[RolloutKey, float]:
    """How right each rollout is by the rule: reported, never trained on. None of a group without a reference, or with a
    rubric as one.
    """
    return {
        (group.group_id, rollout.sibling): right
        for group in groups
        for rollout, right in zip(group.rollouts, _rule_on(group, is_right), strict=False)
    }


def _rule_on(group: JudgedGroup, is_right: Rule) -> list[float]:
    reference = group.prompt.reference
    if reference is None:
        return []
    try:
        return [is_right(rollout.answer, reference) for rollout in group.rollouts]
    except ValueError:
        return []


def describe_trained(
    step: int,
    groups: Sequence[JudgedGroup],
    advantages: Mapping[RolloutKey, float],
    right: Mapping[RolloutKey, float],
    times: Mapping[RolloutKey, RolloutTimes],
) -> list[TrainedRollout]:
    """The lines of trained.jsonl of a step."""
    return [
        _describe(step, (group.group_id, rollout.sibling), verdict, advantages, right, times)
        for group in groups
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
    ]


def _describe(
    step: int,
    key: RolloutKey,
    verdict: Verdict | Failed,
    advantages: Mapping[RolloutKey, float],
    right: Mapping[RolloutKey, float],
    times: Mapping[RolloutKey, RolloutTimes],
) -> TrainedRollout:
    group_id, sibling = key
    found = times.get(key)
    judged_s = found.judged_s if found is not None else None
    return TrainedRollout(
        group_id=group_id,
        sibling=sibling,
        step=step,
        reward=get_reward(verdict),
        advantage=advantages.get(key),
        right=right.get(key),
        rollout_s=None if found is None else round(found.ended_s - found.began_s, DECIMALS_S),
        judging_s=None if found is None or judged_s is None else round(judged_s - found.ended_s, DECIMALS_S),
    )
