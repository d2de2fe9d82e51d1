"""What a user can set about task=plan. Frozen, checked; plans nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

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
