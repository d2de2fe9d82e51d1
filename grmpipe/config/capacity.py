"""Settings of task=plan and task=simulate. Frozen, checked; plans and simulates nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.bounds import Bounded, at_least, between_0_and_1
from scheduler.devices import DeviceSpec


@dataclass(frozen=True)
class PlanConfig:
    """Settings of `task=plan`, which plans a run."""

    rollout_tokens: int = 0  # Mean length of a rollout; 0: half of rollout.max_new_tokens.
    judgement_tokens: int = 0  # Mean length of a judgement; 0: half of judge.max_new_tokens.
    # [cores] Cores of the machine that CPU slots are on; 0: those of this machine, or the number of slots if larger.
    cores: int = 0
    devices: dict[str, DeviceSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("rollout_tokens", "judgement_tokens"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        if self.cores < 0:
            raise ValueError(f"cores: must be 0 (those of this machine) or more, got {self.cores}")


@dataclass(frozen=True)
class SimulateConfig(Bounded):
    """Settings of `task=simulate`, which simulates a run."""

    steps: int = at_least(1, 20)  # [steps] Simulated steps.
    # Directory of an earlier run, whose rollouts and judgements give the lengths; null: lognormal lengths.
    lengths: str | None = None
    # Standard deviation of the logarithm of a rollout's length; at 0.6 the longest of 100 is 4 times the median. The
    # mean is that of task=plan: plan.rollout_tokens, plan.judgement_tokens.
    rollout_sigma: float = at_least(0, 0.6)
    # Standard deviation of the logarithm of a judgement's length; 0: equal lengths.
    judgement_sigma: float = at_least(0, 0.3)
    unparseable_share: float = between_0_and_1(0.0)  # Share of judgements that can't be parsed.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths == "":
            raise ValueError("lengths: is empty; give a run's directory, or null")
