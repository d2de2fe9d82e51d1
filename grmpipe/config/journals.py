"""Settings of the journals of a run: rollouts.jsonl, judgements.jsonl, and those of evaluations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JournalsConfig:
    """The journals: every rollout and judgement, with token ids and log-probs."""

    # Pack the token ids and log-probs of each line: long answers with their judgements take less than half of the disk.
    # All commands read both forms.
    compact: bool = False
