"""Settings of the journals of a run: rollouts.jsonl, judgements.jsonl, and those of evaluations."""

from dataclasses import dataclass

from grmpipe.models.bounds import Bounded, above

ALL = "all"
KEEP = (ALL, "text")


@dataclass(frozen=True)
class JournalsConfig(Bounded):
    """The journals: every rollout and judgement, with token ids and log-probs."""

    # Pack the token ids and log-probs of each line: long answers with their judgements take less than half of the disk.
    # All commands read both forms.
    compact: bool = False
    # [GB] Most that the journals of a training may take (10^9 bytes): above it, if thinning isn't enough, the run
    # stops, after a step or within one, with a checkpoint. Null: no limit.
    max_gb: float | None = above(0, None, "above 0, or null for no limit")
    # What stays of lines that no resume reads any more: all; text, without token ids and log-probs; or a share of the
    # groups, such as 0.1, whole, and of the others lengths, scores and verdicts. A run that was thinned can't be
    # retrained from.
    keep: str = ALL

    @property
    def kept_share(self) -> float | None:
        """The share of the groups that stay whole; None: lines of all groups are treated alike."""
        return None if self.keep in KEEP else float(self.keep)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            fits = self.keep in KEEP or 0 < float(self.keep) < 1
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"keep: must be all, text or a share between 0 and 1, such as 0.1; got {self.keep}")
