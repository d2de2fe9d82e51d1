"""Opens no group while the policy's engines return no rollouts, and then stops the run. Sends no request itself."""

from __future__ import annotations

from collections.abc import Mapping

from grmpipe.judge.monitor.circuit_breaker import CircuitBreaker, Fitness, Unfit
from grmpipe.pipeline.group import Group
from grmpipe.pipeline.interfaces import KILLED_ENGINES, FlowConfig
from grmpipe.types import Failed, InfraCause

CAUSES: Mapping[str, InfraCause] = {  # causes of dropped groups that are the fault of the policy's engines
    "rollout_refused": "refused",
    "rollout_timeout": "timeout",
    "rollout_died": "died",
    KILLED_ENGINES: "died",
}


class PolicyUnfit(Unfit):
    """Too many groups ended without their rollouts."""


class PolicyFitness(Fitness):
    """Counts ended groups: with all rollouts, or dropped because the policy's engines failed."""

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
        """Count an ended group that sent requests. Raises PolicyUnfit when the gate closes for good."""
        if (cause := CAUSES.get(group.cause)) is not None:
            self.record(Failed(stage="rollout", cause=cause, attempts=1, detail=group.detail))
        elif group.is_rolled_out:
            self.record(group)
