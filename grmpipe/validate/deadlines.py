"""Checks that deadlines can be distinguished: which silence ended a group. Refuses, measures nothing."""

from __future__ import annotations

from grmpipe.config.run_config import ConfigError, RunConfig


def check_deadlines(config: RunConfig) -> None:
    """Check that a judgement can time out before its group's deadline, which would take all verdicts at once."""
    judge_s, group_s = config.judge.timeout_s, config.rollout.group_deadline_s
    if config.judged_by_model and judge_s >= group_s:
        rollout = config.rollout
        played_s = rollout.max_turns * rollout.max_new_tokens / rollout.min_tokens_per_s
        raise ConfigError(
            f"judge.timeout_s: {judge_s:g} s isn't below rollout.group_deadline_s = {group_s:g} s, the time to "
            "roll out and judge a group: the deadline would end judgements before their timeout; "
            f"type rollout.group_deadline_s={played_s + judge_s:g} or more, or a shorter judge.timeout_s"
        )
