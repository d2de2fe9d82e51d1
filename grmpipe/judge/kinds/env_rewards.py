"""Judges by the rewards that the environment gave for its turns."""

from grmpipe.config.raw_scores import EnvRewardConfig, sum_rewards
from grmpipe.judge.verdict import make_failure, outcome, report_failures, report_score
from grmpipe.types import JudgeReport, Prompt, RewardSpan, Rollout

COMPONENT = "env"  # the name of its reward in a breakdown


class EnvRewardJudge:
    """The sum of the environment's rewards is the score and the reward, on no scale. A rollout without any reward is
    Failed: the environment didn't say what it is worth, which is not 0, unless `missing` says so.
    """

    def __init__(self, config: EnvRewardConfig) -> None:
        self._config = config

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        found = [self._config.sum_rewards(turn.rewards) for turn in rollout.turns]
        given = {turn: reward for turn, reward in enumerate(found) if reward is not None}
        if not given and self._config.missing is not None:
            given = {len(rollout.turns) - 1: self._config.missing}
        if not given:
            return report_failures(make_failure("undecided", self._missing(rollout)))
        total = sum_rewards(given.values())
        rewards = by_turn(rollout, given) if self._config.by_turn else outcome(rollout, total)
        return report_score(rewards, total, {COMPONENT: total})

    def _missing(self, rollout: Rollout) -> str:
        wanted = f" called {' or '.join(self._config.weights)}" if self._config.weights else ""
        got = ", ".join(rollout.env_rewards) or "none at all"
        return f"the environment gave no reward{wanted}; it gave {got}"


def by_turn(rollout: Rollout, rewards: dict[int, float]) -> tuple[RewardSpan, ...]:
    """A span over the tokens of each turn that earned a reward."""
    return tuple(
        RewardSpan(turn=turn, start=0, end=len(rollout.turns[turn].completion.token_ids), value=reward)
        for turn, reward in rewards.items()
    )
