"""Replaces dead engines of a role: DEAD, STARTING, STALE, current weights, HEALTHY. Starts no process itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HealthConfig:
    """How many dead engines are replaced, and how soon a death is noticed that no request met."""

    max_replacements: int = 3  # tries by role, over the run; 0: a dead engine stays dead
    check_every_s: float = 5.0  # between two looks at engines that nobody asks for anything
    start_deadline_s: float = 600.0  # until a replacement has its process and its model

    def __post_init__(self) -> None:
        if self.max_replacements < 0:
            raise ValueError(f"max_replacements: must be 0 or more, got {self.max_replacements}")
        for key in ("check_every_s", "start_deadline_s"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}: must be above 0, got {getattr(self, key)}")
