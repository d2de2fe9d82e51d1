"""Settings of task=plan and task=simulate. Frozen, checked; plans and simulates nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from models.bounds import Bounded, at_least, between_0_and_1
from models.types import EngineSpeed
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
class SpeedConfig(Bounded):
    """Speed of one engine. A decoding step of B rows with K cached tokens in all takes
    step_s + B * row_s + K * cached_token_s.
    """

    step_s: float = at_least(0, 0.0)  # Fixed part of a decoding step.
    row_s: float = at_least(0, 0.0)  # Part of a decoding step for each of its rows.
    cached_token_s: float = at_least(0, 0.0)  # Part of a decoding step for each cached token of its rows.
    prefill_token_s: float = at_least(0, 0.0)  # Prefill of a prompt token that isn't cached.
    request_s: float = at_least(0, 0.0)  # Time to receive a request and send its answer, whatever its length.
    max_rows: int = at_least(1, 256)  # [requests] Requests that decode at once.
    kv_tokens: int = at_least(0, 0)  # Capacity for keys and values; 0: no limit.

    @property
    def stated(self) -> bool:
        return self.step_s > 0 or self.row_s > 0

    def speed(self) -> EngineSpeed:
        return EngineSpeed(**dataclasses.asdict(self))


@dataclass(frozen=True)
class StatedCosts(Bounded):
    """Costs stated by the user, for all roles of the run or for none; without them costs are estimated as for
    task=plan.
    """

    policy: SpeedConfig = field(default_factory=SpeedConfig)
    grm: SpeedConfig = field(default_factory=SpeedConfig)
    # Engines of further models that judge: `+simulate.costs.models={<name>: {step_s: 0.02}}`.
    models: dict[str, SpeedConfig] = field(default_factory=dict)
    # Forward and backward pass of a packed token, all ranks together. Passes without gradients (of a reference, for
    # pi_old) take their share of it.
    learner_token_s: float = at_least(0, 0.0)
    learner_step_s: float = at_least(0, 0.0)  # Optimizer step of the learner.
    # Forward and backward pass of a packed token in the critic, all ranks together.
    critic_token_s: float = at_least(0, 0.0)
    critic_step_s: float = at_least(0, 0.0)  # Optimizer step of the critic.
    sync_s: float = at_least(0, 0.0)  # A push of the policy's weights to its engines.
    switch_s: float = at_least(0, 0.0)  # Change of an elastic slot's role, or of the phase of a time-shared pool.
    driver_request_s: float = at_least(0, 0.0)  # Work of the driver for each request to an engine.

    @property
    def engines(self) -> dict[str, SpeedConfig]:
        """Role -> speed of one of its engines."""
        return {"policy": self.policy, "grm": self.grm, **self.models}


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
    costs: StatedCosts = field(default_factory=StatedCosts)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths == "":
            raise ValueError("lengths: is empty; give a run's directory, or null")
