"""Opens no group while environments fail, and then stops the run. Starts no environment."""

from __future__ import annotations

from grmpipe.config.run_config import ConfigError
from grmpipe.judge.monitor.circuit_breaker import CircuitBreaker, Fitness, Unfit
from grmpipe.pipeline.interfaces import FlowConfig
from grmpipe.types import EnvCause, Failed

NUM_FIRST = 8  # episodes; if all of these fail through the environment's own code, it never worked
OWN_CODE: tuple[EnvCause, ...] = ("broken", "protocol")


class EnvUnfit(Unfit):
    """Too many episodes ended because their environment failed in every attempt."""


class EnvFitness(Fitness):
    """Counts episodes: played to their end, or failed by the environment in all their attempts."""

    work = "playing"
    unfit = EnvUnfit

    def __init__(self, breaker: CircuitBreaker) -> None:
        super().__init__(breaker)
        self._num_broken = 0  # of the first episodes; -1: some episode did not fail so

    @classmethod
    def of(cls, config: FlowConfig) -> EnvFitness:
        breaker = CircuitBreaker(
            max_failure_rate=config.env_max_failure_rate,
            window=config.env_failure_window,
            pause_s=config.env_pause_s,
            counted="episodes",
            key="env.max_failure_rate",
        )
        return cls(breaker)

    def episode_ended(self, result: object) -> None:
        """Count an ended episode: a Failed, or anything else. Raises EnvUnfit when the gate closes for good, and
        ConfigError for an environment that never worked.
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
        self.record(result)
