"""The judges and compositions that a service answers by, by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.reward import RewardTree
from grmpipe.data.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedJudges:
    """max_failure_rate: above it the service is degraded."""

    judges: Mapping[str, JudgeConfig]
    rewards: RewardTree
    max_failure_rate: float

    @property
    def names(self) -> list[str]:
        return sorted({*self.judges, *self.rewards.entries})

    def repeats(self, name: str, row: Row) -> bool:
        """Whether an equal question would get equal judgements."""
        return row.get("prompt_id") is not None or all(
            judge.kind != "generative" or judge.temperature == 0 for judge in self._asked(name)
        )

    def compares(self, name: str) -> bool:
        """Whether a reward depends on siblings."""
        waits = name in self.rewards.entries and self.rewards.below(name).waits_for_siblings()
        return waits or any(judge.waits_for_siblings for judge in self._asked(name))

    def describe(self) -> Mapping[str, object]:
        judges = {
            name: {"kind": judge.kind, "model": judge.model, "scale": [judge.scale.low, judge.scale.high]}
            for name, judge in self.judges.items()
        }
        return {
            "judges": judges,
            "compositions": {name: {"kind": one.kind} for name, one in self.rewards.entries.items()},
        }

    def _asked(self, name: str) -> Iterator[JudgeConfig]:
        return (self.judges[one] for one in self.rewards.list_judges(name) if one in self.judges)
