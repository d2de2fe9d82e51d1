"""What a host of environments is given besides their configuration: limits by stage, faults to inject. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Time limits on the stages of an episode in its environment; all finite.

    boot_s:  until `open` has returned, the start of the process included.
    step_s:  of one `step`.
    close_s: of `close`, and once more until the processes have ended by SIGTERM; then comes SIGKILL.
    """

    boot_s: float = 30.0
    step_s: float = 10.0
    close_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjection:
    """Faults on purpose, to see that none becomes a reward. `share` of episodes lose their process at a random step.

    Drawn from `seed` and the episode's own seed, so that the same episodes are hit in each run.
    """

    share: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class SeatCounts:
    """Seats of a host. All that were opened have ended in one way once it is closed: opened == closed + killed.

    closed: ended by themselves within their limits. killed: ended by a signal: a limit, a fault, or deaf to `close`.
    """

    opened: int = 0
    closed: int = 0
    killed: int = 0
