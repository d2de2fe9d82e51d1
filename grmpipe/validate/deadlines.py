"""Checks that deadlines can be distinguished: which silence ended a group. Refuses, measures nothing."""

from __future__ import annotations

from grmpipe.config.judging import key_of_judge
from grmpipe.config.run_config import ConfigError, RunConfig


def check_deadlines(config: RunConfig) -> None:
    """Check that a judgement can time out before its group's deadline, which would take all verdicts at once."""
    rollout = config.rollout
    group_s = rollout.group_deadline_s
    for name, judge in config.judging.generative.items():
        if (judge_s := judge.timeout_s) < group_s:
            continue
        played_s = rollout.max_turns * rollout.max_new_tokens / rollout.min_tokens_per_s
        raise ConfigError(
            f"{key_of_judge(name)}.timeout_s: {judge_s:g} s isn't below rollout.group_deadline_s = {group_s:g} s, the "
            "time to roll out and judge a group: the deadline would end judgements before their timeout; "
            f"type rollout.group_deadline_s={played_s + judge_s:g} or more, or a shorter {key_of_judge(name)}.timeout_s"
        )
