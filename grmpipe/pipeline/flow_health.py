"""The health of what a flow samples with: the policy's engines, by its groups, and environments, by their episodes."""

from collections.abc import Mapping

from grmpipe.config.run_config import ConfigError
from grmpipe.pipeline.group import Group
from grmpipe.pipeline.interfaces import KILLED_ENGINES, FlowConfig
from grmpipe.pipeline.service_health import ServiceHealth
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import EnvCause, Failed, InfraCause

CAUSES: Mapping[str, InfraCause] = {  # causes of dropped groups that are the fault of the policy's engines
    "rollout_refused": "refused",
    "rollout_timeout": "timeout",
    "rollout_died": "died",
    KILLED_ENGINES: "died",
}
GROUPS_IN_VIEW = 32  # the latest ones, whose failures count
EPISODES_IN_VIEW = 64
NUM_FIRST = 8  # episodes; if all of these fail through the environment's own code, it never worked
OWN_CODE: tuple[EnvCause, ...] = ("broken", "protocol")


class FlowHealth:
    """Pauses the admission of groups while engines or environments fail too often, and then stops the run."""

    def __init__(self, config: FlowConfig) -> None:
        self._engines = ServiceHealth(
            "rolling out",
            max_failure_rate=config.rollout_max_failure_rate,
            window=GROUPS_IN_VIEW,
            pause_s=config.pause_s,
            counted="groups",
            key="rollout.max_failure_rate",
        )
        self._envs = ServiceHealth(
            "playing",
            max_failure_rate=config.env_max_failure_rate,
            window=EPISODES_IN_VIEW,
            pause_s=config.pause_s,
            counted="episodes",
            key="env.max_failure_rate",
        )
        self._num_broken = 0  # of the first episodes; -1: some episode did not fail so

    async def until_fit(self, clock: ActiveClock) -> None:
        await self._engines.until_fit(clock)
        await self._envs.until_fit(clock)

    def group_ended(self, group: Group) -> None:
        """Count a group that ended with all its rollouts, or because the policy's engines failed. Raises Unfit if it
        stops the run.
        """
        if (cause := CAUSES.get(group.cause)) is not None:
            self._engines.record(Failed(stage="rollout", cause=cause, attempts=1, detail=group.detail))
        elif group.is_rolled_out:
            self._engines.record(group)

    def episode_ended(self, result: object) -> None:
        """Count an ended episode: a Failed if its environment failed in all attempts, or anything else. Raises Unfit if
        it stops the run, and ConfigError for an environment that never worked.
        """
        if not (isinstance(result, Failed) and result.cause in OWN_CODE):
            self._num_broken = -1
        elif self._num_broken >= 0:
            self._num_broken += 1
            if self._num_broken == NUM_FIRST:
                raise ConfigError(
                    f"env: the first {NUM_FIRST} episodes all failed by an error of the environment itself; "
                    f"the last one: {result.detail}; run.log has the traceback"
                )
        self._envs.record(result)
