"""What a user can set about labels that a judge is trained by. Frozen, checked; opens no file."""

from __future__ import annotations

from dataclasses import dataclass

LABEL_RULES = ("exact", "same_side")


@dataclass(frozen=True)
class LabelConfig:
    """When a judgement of one response agrees with its label. Of several, the labelled best must be strictly first."""

    rule: str = "exact"  # exact: the very score (SPCT); same_side: both at least `pass_score`, or both below
    pass_score: int = 8  # of same_side, and of rollouts that a rule calls right: a judge that passes them scores so

    def __post_init__(self) -> None:
        if self.rule not in LABEL_RULES:
            raise ValueError(f"rule: unknown value {self.rule!r}; known: {', '.join(LABEL_RULES)}")
