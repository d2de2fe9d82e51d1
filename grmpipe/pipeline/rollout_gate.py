"""Opens no group while the policy's engines bring no rollouts, and then stops the run. Asks no engine itself."""

from __future__ import annotations

from collections.abc import Mapping

from grmpipe.judge.monitor.circuit_breaker import CircuitBreaker, Fitness, Unfit
from grmpipe.pipeline.group import Group
from grmpipe.pipeline.interfaces import KILLED_ENGINES, FlowConfig
from grmpipe.types import Failed, InfraCause

CAUSES: Mapping[str, InfraCause] = {  # of dropped groups, that the policy's engines answer for
    "rollout_refused": "refused",
    "rollout_timeout": "timeout",
    "rollout_died": "died",
    KILLED_ENGINES: "died",
}


class PolicyUnfit(Unfit):
    """Too many groups ended without their rollouts."""


class PolicyFitness(Fitness):
    """Counts the ends of groups: with all rollouts, or by a cause that the policy's engines answer for."""

    work = "rolling out"
    unfit = PolicyUnfit

    @classmethod
    def of(cls, config: FlowConfig) -> PolicyFitness:
        breaker = CircuitBreaker(
            max_failure_rate=config.rollout_max_failure_rate,
            window=config.rollout_failure_window,
            pause_s=config.rollout_pause_s,
            counted="groups",
            key="rollout.max_failure_rate",
        )
        return cls(breaker)

    def group_ended(self, group: Group) -> None:
        """Raises PolicyUnfit when the gate closes for good. Groups that were never asked for don't count."""
        if (cause := CAUSES.get(group.cause)) is not None:
            self.record(Failed(stage="rollout", cause=cause, attempts=1, detail=group.detail))
        elif group.is_rolled_out:
            self.record(group)
