"""Settings of the judge's monitor: what is measured, how often, and limits on metrics. Frozen, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grmpipe.models.bounds import Bounded, at_least, one_of

ACTIONS = ("warn", "pause", "stop")


@dataclass(frozen=True)
class LimitConfig(Bounded):
    """A limit on a metric of metrics.jsonl, under a name of your choice, and what happens if it is exceeded."""

    metric: str = ""  # Name of the metric, such as judge/score_length_correlation.
    above: float | None = None  # Largest value without an alarm; null: no upper bound.
    below: float | None = None  # Smallest value without an alarm; null: no lower bound.
    # If the limit is exceeded: an alarm (warn); an alarm that pauses judging for rollout.pause_s, and ends the
    # run if it soon fires again (pause); or the end of the run (stop).
    action: str = one_of(ACTIONS, "warn")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.metric:
            raise ValueError("metric: missing; give a name of metrics.jsonl, such as judge/score_length_correlation")
        bounds = [bound for bound in (self.above, self.below) if bound is not None]
        if not bounds or not all(math.isfinite(bound) for bound in bounds):
            raise ValueError(f"above: give a finite number for above, below or both for {self.metric}")


# Those of conf/config.yaml, which nobody typed: they are silent in a run that has no such metric.
OUR_LIMITS = {"fooled": LimitConfig(metric="judge_monitor/attack_success_share", above=0.2)}
# For judges that compare, beside those of the configuration: worse than tossing a coin between the two orders, and one
# place that wins by being first.
LIMITS_OF_COMPARING = {
    "order_flips": LimitConfig(metric="judge/order_flips_share", above=0.6),
    "first_place": LimitConfig(metric="judge/first_place_share", above=0.75),
}


@dataclass(frozen=True)
class JudgeMonitorConfig(Bounded):
    """Monitoring of the judge during a run. These judgements enter no training and no count of judgements."""

    # [prompts] How many of the held-out prompts (data.eval_path) an evaluation during a run asks, whether or not their
    # truth is known; the first and the last evaluation use all of them.
    anchors: int = at_least(1, 64)
    # [steps] Interval of checks with canaries (16 fixed responses) and adversarial replies (ten without content to each
    # of two prompts, or those of canaries_path), the first before step 1; 0: no such checks.
    every: int = at_least(0, 20)
    # File of labelled judgements to take canaries from, which a comparing judge needs; null: responses of the first
    # held-out evaluation. Responses with right=false in it, as in probes_held_out.jsonl of task=probe_judge, are the
    # adversarial replies, too.
    canaries_path: str | None = None
    limits: dict[str, LimitConfig] = field(default_factory=dict)
    # Judges or compositions that only watch, as in {gold: 0.2}: by name, the share of the trained groups that each
    # judges, drawn by seed, at the lowest priority; nothing is trained on their verdicts. Null: none.
    watch: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.watch is not None and not isinstance(self.watch, Mapping):
            raise ValueError(f"watch: give names and shares, as in {{gold: 0.2}}, got {self.watch!r}")
        for name, share in self.watchers.items():
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ValueError(f"watch.{name}: is a share of the groups, above 0 and at most 1, got {share!r}")

    @property
    def typed_limits(self) -> Mapping[str, LimitConfig]:
        return {name: limit for name, limit in self.limits.items() if OUR_LIMITS.get(name) != limit}

    @property
    def watchers(self) -> Mapping[str, float]:
        """Judge or composition that only watches -> its share of the groups."""
        return self.watch or {}
