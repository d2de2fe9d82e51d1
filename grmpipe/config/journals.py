"""Settings of the journals of a run: rollouts.jsonl, judgements.jsonl, and those of evaluations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JournalsConfig:
    """The journals: every rollout and judgement, with token ids and log-probs."""

    # Pack the token ids and log-probs of each line: long answers with their judgements take less than half of the disk.
    # All commands read both forms.
    compact: bool = False
    # [GB] Most that the journals of a training may take (10^9 bytes): above it the run stops after its step, with a
    # checkpoint. Null: no limit.
    max_gb: float | None = None

    def __post_init__(self) -> None:
        if self.max_gb is not None and not self.max_gb > 0:
            raise ValueError(f"max_gb: must be above 0, or null for no limit; got {self.max_gb:g}")
