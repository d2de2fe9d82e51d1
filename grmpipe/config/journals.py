"""Settings of the journals of a run: rollouts.jsonl, judgements.jsonl, and those of evaluations."""

from dataclasses import dataclass

from models.bounds import Bounded, above


@dataclass(frozen=True)
class JournalsConfig(Bounded):
    """The journals: every rollout and judgement, with token ids and log-probs."""

    # Pack the token ids and log-probs of each line: long answers with their judgements take less than half of the disk.
    # All commands read both forms.
    compact: bool = False
    # [GB] Most that the journals of a training may take (10^9 bytes): above it the run stops after its step, with a
    # checkpoint. Null: no limit.
    max_gb: float | None = above(0, None, "above 0, or null for no limit")
