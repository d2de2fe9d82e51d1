"""Settings of task=plan and task=simulate. Frozen, checked; plans and simulates nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

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
class SpeedConfig:
    """Speed of one engine. A decoding step of B rows with K cached tokens in all takes
    step_s + B * row_s + K * cached_token_s.
    """

    step_s: float = 0.0  # Fixed part of a decoding step.
    row_s: float = 0.0  # Part of a decoding step for each of its rows.
    cached_token_s: float = 0.0  # Part of a decoding step for each cached token of its rows.
    prefill_token_s: float = 0.0  # Prefill of a prompt token that isn't cached.
    request_s: float = 0.0  # Time to receive a request and send its answer, whatever its length.
    max_rows: int = 256  # [requests] Requests that decode at once.
    kv_tokens: int = 0  # Capacity for keys and values; 0: no limit.

    def __post_init__(self) -> None:
        for key in ("step_s", "row_s", "cached_token_s", "prefill_token_s", "request_s"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        if self.max_rows < 1:
            raise ValueError(f"max_rows: must be at least 1, got {self.max_rows}")
        if self.kv_tokens < 0:
            raise ValueError(f"kv_tokens: must be 0 or more, got {self.kv_tokens}")

    @property
    def stated(self) -> bool:
        return self.step_s > 0 or self.row_s > 0

    def speed(self) -> EngineSpeed:
        return EngineSpeed(
            step_s=self.step_s,
            row_s=self.row_s,
            cached_token_s=self.cached_token_s,
            prefill_token_s=self.prefill_token_s,
            max_rows=self.max_rows,
            kv_tokens=self.kv_tokens,
            request_s=self.request_s,
        )


@dataclass(frozen=True)
class StatedCosts:
    """Costs stated by the user, for all roles of the run or for none; without them costs are estimated as for
    task=plan.
    """

    policy: SpeedConfig = field(default_factory=SpeedConfig)
    grm: SpeedConfig = field(default_factory=SpeedConfig)
    # Engines of further models that judge: `+simulate.costs.models={<name>: {step_s: 0.02}}`.
    models: dict[str, SpeedConfig] = field(default_factory=dict)
    # Forward and backward pass of a packed token, all ranks together. Passes without gradients (of a reference, for
    # pi_old) take their share of it.
    learner_token_s: float = 0.0
    learner_step_s: float = 0.0  # Optimizer step of the learner.
    critic_token_s: float = 0.0  # Forward and backward pass of a packed token in the critic, all ranks together.
    critic_step_s: float = 0.0  # Optimizer step of the critic.
    sync_s: float = 0.0  # A push of the policy's weights to its engines.
    switch_s: float = 0.0  # Change of an elastic slot's role, or of the phase of a time-shared pool.
    driver_request_s: float = 0.0  # Work of the driver for each request to an engine.

    def __post_init__(self) -> None:
        for key in (
            "learner_token_s", "learner_step_s", "critic_token_s", "critic_step_s", "sync_s", "switch_s",
            "driver_request_s",
        ):  # fmt: skip
            if not 0 <= getattr(self, key) < float("inf"):
                raise ValueError(f"costs.{key}: must be 0 or more, got {getattr(self, key)}")

    @property
    def engines(self) -> dict[str, SpeedConfig]:
        """Role -> speed of one of its engines."""
        return {"policy": self.policy, "grm": self.grm, **self.models}


@dataclass(frozen=True)
class SimulateConfig:
    """Settings of `task=simulate`, which simulates a run."""

    steps: int = 20  # [steps] Simulated steps.
    # Directory of an earlier run, whose rollouts and judgements give the lengths; null: lognormal lengths.
    lengths: str | None = None
    # Median length of a rollout; 0: chosen so that the mean is that of task=plan.
    rollout_median_tokens: float = 0.0
    # Standard deviation of the logarithm of a rollout's length; at 0.6 the longest of 100 is 4 times the median.
    rollout_sigma: float = 0.6
    # Median length of a judgement; 0: chosen so that the mean is that of task=plan.
    judgement_median_tokens: float = 0.0
    judgement_sigma: float = 0.3  # Standard deviation of the logarithm of a judgement's length; 0: equal lengths.
    unparseable_share: float = 0.0  # Share of judgements that can't be parsed.
    costs: StatedCosts = field(default_factory=StatedCosts)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps: must be at least 1, got {self.steps}")
        if self.lengths == "":
            raise ValueError("lengths: is empty; give a run's directory, or null")
        for key in ("rollout_median_tokens", "rollout_sigma", "judgement_median_tokens", "judgement_sigma"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        if not 0 <= self.unparseable_share <= 1:
            raise ValueError(f"unparseable_share: must be between 0 and 1, got {self.unparseable_share}")
