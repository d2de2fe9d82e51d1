"""Settings of tracking. Frozen, checked, free of W&B."""

from __future__ import annotations

from dataclasses import dataclass, field

WANDB_MODES = ("auto", "online", "offline", "disabled")


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics and tables go. The files in `run_dir` are always written."""

    # Mode of W&B; auto: online if WANDB_API_KEY is set, otherwise offline. No mode asks for a key.
    wandb_mode: str = "auto"
    project: str = "grmpipe"  # W&B's project.
    run_name: str | None = None  # Name of the run in W&B; null: that of its folder.
    tags: list[str] = field(default_factory=list)  # Tags of the run in W&B.
    table_every: int = 10  # [steps] Interval between tables of rollouts with their judgements in W&B; 0: none.
    table_rows: int = 8  # [rows] Rollouts of a table.
    console: bool = True  # Show progress: a live panel in a terminal, a line per step elsewhere.

    def __post_init__(self) -> None:
        if self.wandb_mode not in WANDB_MODES:
            raise ValueError(f"wandb_mode: unknown mode {self.wandb_mode!r}; known: {', '.join(WANDB_MODES)}")
        if not self.project:
            raise ValueError("project: is empty; give the W&B project's name, for example grmpipe")
        if self.table_every < 0:
            raise ValueError(f"table_every: must be 0 (no tables) or more steps, got {self.table_every}")
        if self.table_rows < 1:
            raise ValueError(f"table_rows: must be at least 1, got {self.table_rows}")
