"""What is known of trained rollouts: a failed verdict has no number, and what a resume found no seconds."""

from __future__ import annotations

from grmpipe.pipeline.interfaces import RolloutTimes
from grmpipe.pipeline.step_metrics import describe_trained
from grmpipe.types import Failed, JudgedGroup, Prompt, RewardSpan, Rollout, TrainedRollout, Verdict

VERDICT = Verdict(
    rewards=(RewardSpan(turn=0, start=0, end=2, value=0.5),), score=5.0, breakdown={}, score_std=0.0, num_judgements=1
)
LOST = Failed(stage="judge", cause="timeout", attempts=1)


def test_trained_rollout_holds_known_values_only() -> None:
    rollouts = tuple(Rollout(group_id="g", sibling=sibling, turns=(), status="finished") for sibling in range(3))
    group = JudgedGroup(
        group_id="g", prompt=Prompt(prompt_id="p", messages=()), rollouts=rollouts, verdicts=(VERDICT, LOST, VERDICT)
    )
    times = {
        ("g", 0): RolloutTimes(began_s=1.0, ended_s=3.5, judged_s=7.5),
        ("g", 1): RolloutTimes(began_s=1.0, ended_s=2.0),
    }
    told = describe_trained(4, [group], {("g", 0): 1.25, ("earlier", 0): 9.0}, {("g", 0): 1.0}, times)
    assert told == [
        TrainedRollout(
            group_id="g", sibling=0, step=4, reward=0.5, advantage=1.25, right=1.0, rollout_s=2.5, judging_s=4.0
        ),
        TrainedRollout(group_id="g", sibling=1, step=4, rollout_s=1.0),
        TrainedRollout(group_id="g", sibling=2, step=4, reward=0.5),
    ]
