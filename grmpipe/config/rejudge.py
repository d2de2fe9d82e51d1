"""Settings of task=rejudge. Frozen, checked."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class RejudgeConfig:
    """Judging the stored rollouts of the run in run_dir again."""

    name: str = "again"  # Folder of the new verdicts, in <run_dir>/rejudged/. Another judge needs another name.
    sample: float = 1.0  # Share of the groups that are judged again, drawn by seed.
    # [steps] The first and the last step whose groups are judged again, as in [10, 20]; null: all groups, also those
    # that were not trained on.
    steps: list[int] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-][\w.-]*", self.name):
            raise ValueError(f"name: may hold letters, digits, '_', '-' and, not as the first, '.', got {self.name!r}")
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample: is a share of the groups, above 0 and at most 1, got {self.sample}")
        if self.steps is not None and not (len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1]):
            raise ValueError(f"steps: give the first and the last step, as in [10, 20], got {self.steps}")

    def wants(self, step: int | None) -> bool:
        """Whether groups of a step are judged again. step: that trained them; None: no step did."""
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])
