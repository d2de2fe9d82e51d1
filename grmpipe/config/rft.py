"""What a user can set about rejective fine-tuning. Frozen, checked; opens no file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FinetuneConfig:
    """A GRM imitates those of its own critiques that were right (SPCT, arXiv 2504.02495, section 3.2)."""

    num_samples: int = 3  # of each lesson; where all are right it is too easy, and dropped
    hint: bool = True  # where none is right, one more sample is shown the label, and trained without it if right
    num_epochs: int = 2  # over what is kept
    critiques_per_batch: int = 32  # of one optimizer step

    def __post_init__(self) -> None:
        for key in ("num_samples", "num_epochs", "critiques_per_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")
