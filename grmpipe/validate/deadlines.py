"""Checks that deadlines can be distinguished: which silence ended a group. Refuses, measures nothing."""

from __future__ import annotations

from grmpipe.config.run_config import ConfigError, RunConfig


def check_deadlines(config: RunConfig) -> None:
    """Check that a judgement can time out before its group's deadline, which would take all verdicts at once; and the
    last one of judges that are asked one after the other.
    """
    rollout, judging = config.rollout, config.judging
    group_s = rollout.group_deadline_s
    timed = judging.generative | judging.scalar
    timeouts_s = {name: timed[name].limits.timeout_s if name in timed else 0.0 for name in judging.judges}
    chain = [name for name in config.rewards.longest_chain(timeouts_s) if name in timed]
    judged_s = sum(timeouts_s[name] for name in chain)
    if judged_s < group_s:
        return
    keys = " + ".join(f"{timed[name].key}.limits.timeout_s" for name in chain)
    played_s = rollout.max_turns * rollout.max_new_tokens / rollout.min_tokens_per_s
    raise ConfigError(
        f"{keys}: {judged_s:g} s isn't below rollout.group_deadline_s = {group_s:g} s, the time to roll out and judge "
        "a group: the deadline would end judgements before their timeout; type rollout.group_deadline_s="
        f"{played_s + judged_s:g} or more, or a shorter {timed[chain[-1]].key}.limits.timeout_s"
    )
