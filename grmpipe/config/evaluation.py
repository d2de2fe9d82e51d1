"""What a user can set about task=evaluate: the data, the votes. Frozen, checked; opens no file."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EvaluateConfig:
    """How a judge is measured against labels.

    path: a .jsonl, .json or .parquet file, or tiny://judgements_held_out; docs/evaluating.md lists the schemas.
    """

    path: str = "tiny://judgements_held_out"
    num_items: int = 512  # made for tiny://; of a file, the first ones
    ks: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])  # sampled once, at the largest
    max_subsets: int = 32  # of the judgements of an item, for each smaller k: all, or so many drawn by the seed
    width: int = 64  # items in flight

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: is empty; give a file, or type evaluate.path=tiny://judgements_held_out")
        for key, count in (
            ("num_items", self.num_items), ("max_subsets", self.max_subsets), ("width", self.width)
        ):  # fmt: skip
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        if not self.ks or min(self.ks) < 1 or sorted(set(self.ks)) != list(self.ks):
            raise ValueError(f"ks: must be numbers from 1 on, each larger than the one before, got {self.ks}")
