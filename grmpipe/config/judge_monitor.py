"""What a user can set about watching the judge: what is measured how often, and limits. Frozen, checked; no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ACTIONS = ("warn", "pause", "stop")


@dataclass(frozen=True)
class LimitConfig:
    """A bound on a metric of metrics.jsonl, and what happens beyond it.

    warn: an alarm. pause: judging rests for judge.pause_s as well; soon again, the run stops. stop: the run stops.
    """

    metric: str = ""
    above: float | None = None
    below: float | None = None
    action: str = "warn"

    def __post_init__(self) -> None:
        if not self.metric:
            raise ValueError("metric: missing; give a name of metrics.jsonl, such as judge/score_length_correlation")
        if self.action not in ACTIONS:
            raise ValueError(f"action: unknown value {self.action!r}; known: {', '.join(ACTIONS)}")
        bounds = [bound for bound in (self.above, self.below) if bound is not None]
        if not bounds or not all(math.isfinite(bound) for bound in bounds):
            raise ValueError(f"above: give a finite number for above, below or both for {self.metric}")


@dataclass(frozen=True)
class WatchConfig:
    """How the judge is watched beside the run. What this asks of it enters no training and no count of judgements.

    canaries: responses of the first look at the held-out problems, kept in canaries.jsonl and judged again under the
        same seeds. A judge that compares needs labelled work instead, at canaries_path.
    """

    every: int = 20  # steps between two checks, the first before step 1; 0: no canaries and no fooling replies
    canaries: int = 16
    canaries_path: str | None = None  # labelled work, as evaluate.path takes it
    fooling_prompts: int = 2  # each gets the ten replies that fool judges
    limits: dict[str, LimitConfig] = field(default_factory=dict)  # a name of the user's -> a limit

    def __post_init__(self) -> None:
        for key, count in (
            ("every", self.every), ("canaries", self.canaries), ("fooling_prompts", self.fooling_prompts)
        ):  # fmt: skip
            if count < 0:
                raise ValueError(f"{key}: must be 0 (none) or more, got {count}")
