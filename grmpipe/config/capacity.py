"""Settings of task=plan and task=simulate. Frozen, checked; plans and simulates nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.types import EngineSpeed
from scheduler.devices import DeviceSpec


@dataclass(frozen=True)
class PlanConfig:
    """How a run is planned: `task=plan`.

    profile: an earlier run's directory, or its timeline.json: measured costs and lengths in place of reckoned ones.
    write:   a directory that gets placement/planned.yaml; null: <run_dir>/plan, or runs/<experiment>/plan.
    devices: GPUs that the table doesn't know, or other figures for one that it does.
    """

    search: bool = False  # rank other placements of the same slots, write the best
    profile: str | None = None
    write: str | None = None
    rollout_tokens: int = 0  # mean length of a rollout; 0: the profile's, else half of rollout.max_new_tokens
    judgement_tokens: int = 0  # the same of a judgement
    steps: int = 4  # simulated of each candidate
    max_candidates: int = 16  # simulated, of those with the best bounds
    search_s: float = 30.0  # for simulations, all together
    cores: int = 0  # of the machine that CPU slots are on; 0: this one's, or as many as there are slots
    devices: dict[str, DeviceSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("rollout_tokens", "judgement_tokens"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        if self.steps < 2:
            raise ValueError(f"steps: must be at least 2 (the first one starts with empty engines), got {self.steps}")
        if self.max_candidates < 1:
            raise ValueError(f"max_candidates: must be at least 1, got {self.max_candidates}")
        if self.cores < 0:
            raise ValueError(f"cores: must be 0 (those of this machine) or more, got {self.cores}")
        if not self.search_s > 0:
            raise ValueError(f"search_s: must be above 0, got {self.search_s}")
        for key in ("profile", "write"):
            if getattr(self, key) == "":
                raise ValueError(f"{key}: is empty; give a path, or null")


@dataclass(frozen=True)
class SpeedConfig:
    """The speed of one engine, stated: a decoding step of B rows that hold K cached tokens takes
    step_s + B * row_s + K * cached_token_s; a prompt token that no cache holds prefill_token_s, a request request_s."""

    step_s: float = 0.0
    row_s: float = 0.0
    cached_token_s: float = 0.0
    prefill_token_s: float = 0.0
    request_s: float = 0.0
    max_rows: int = 256
    kv_tokens: int = 0  # 0: no bound

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
    """One's own costs. Stated for every role of the run or for none: none are reckoned, as task=plan does."""

    policy: SpeedConfig = field(default_factory=SpeedConfig)
    grm: SpeedConfig = field(default_factory=SpeedConfig)
    learner_token_s: float = 0.0  # forward and backward of a packed token, all ranks together
    learner_step_s: float = 0.0
    critic_token_s: float = 0.0  # the same of the critic
    critic_step_s: float = 0.0
    sync_s: float = 0.0  # a push of the policy's weights
    switch_s: float = 0.0  # an elastic slot's change of role
    driver_request_s: float = 0.0  # of the pipeline's own process, for each request to an engine

    def __post_init__(self) -> None:
        for key in (
            "learner_token_s", "learner_step_s", "critic_token_s", "critic_step_s", "sync_s", "switch_s",
            "driver_request_s",
        ):  # fmt: skip
            if not 0 <= getattr(self, key) < float("inf"):
                raise ValueError(f"costs.{key}: must be 0 or more, got {getattr(self, key)}")


@dataclass(frozen=True)
class SimulateConfig:
    """How a run is simulated: `task=simulate`.

    lengths: an earlier run's directory, whose rollouts and judgements give the lengths; else they are lognormal.
    """

    steps: int = 20
    lengths: str | None = None
    rollout_median_tokens: float = 0.0  # 0: so that the mean is the one that task=plan reckons with
    rollout_sigma: float = 0.6  # of the logarithm: the longest of 100 is 4 times the median
    judgement_median_tokens: float = 0.0
    judgement_sigma: float = 0.3
    unparseable_share: float = 0.0  # of judgements
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
