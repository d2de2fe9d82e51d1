"""What a training backend must offer: one rank of a learner, as the driver calls it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from grmpipe.models.stored_files import StoredFile
from grmpipe.models.types import GroupLink, WeightBucket, WeightTensor
from grmpipe.types import BatchTotals, Metrics, MicroBatch, OldPass


class SendsWeights(Protocol):
    """The sending end of a push. Rank 0 only, and no collective, but for `bucket` and `broadcast`."""

    def num_buckets(self) -> int:
        """The buckets of a push."""
        ...

    def num_fixed_buckets(self) -> int:
        """How many of the first buckets never change: an engine needs them once."""
        ...

    def connect(self, link: GroupLink | None) -> None:
        """Join the engines' group as its sender, or leave it."""

    def send_changes(self, wanted: bool) -> None:
        """Post what changed in a bucket since it was posted last, or all bytes of it. Only with sync.delta."""

    def bucket(self, index: int) -> WeightBucket | None:
        """Gather a bucket and post it: a collective. None on a rank that doesn't send."""
        ...

    def list_tensors(self) -> tuple[tuple[WeightTensor, ...], ...]:
        """The tensors of each bucket, without checksums. Only for broadcasts."""
        ...

    def broadcast(self, first: int, version: int) -> dict[str, str]:
        """Gather the buckets from `first` on and broadcast them: a collective. Returns the checksums by name."""
        ...


class LearnerRank(Protocol):
    """One rank. All methods are collectives but those that say that only rank 0 is called.

    The driver calls the same method on all ranks, one call at a time, and waits for it. A batch is a few `accumulate`
    and a `step` or a `discard`. Between two of these, a push reads the weights bucket by bucket from `sender`.

    With train.parallel.cp above 1, that many neighbouring ranks get the same micro-batches; the first answers for all.

    `grmpipe.train.learner.learner.Learner` is the one in PyTorch (FSDP2). A backend on another library (Megatron,
    torchtitan) is a class with these methods that is made from (spec, rank, world_size, init_method).
    """

    def expect(self, num_steps: int) -> None:
        """Set the number of steps of the run: the learning rate decays by it."""

    def accumulate(self, micro_batch: MicroBatch, old: OldPass | None = None) -> Metrics:
        """Forward and backward on a micro-batch, without a step. Returns its sums; names end in _sum.

        `old`: of an earlier pass; None: pi_old is the policy of this pass.
        """
        ...

    def imitate(self, micro_batch: MicroBatch, totals: BatchTotals) -> None:
        """Forward and backward on demonstrations, for the step of a batch of this size; their advantages sum to 1 over
        all micro-batches. The gradient of the step gets that of algorithm.sft.coefficient times their negative
        log-likelihood, weighted by them. Only called with algorithm.sft.path.
        """

    def old_pass(self, micro_batch: MicroBatch) -> OldPass:
        """log pi_old of the micro-batch, before the first of several updates."""
        ...

    def reference_logprobs(self, micro_batch: MicroBatch) -> np.ndarray:
        """log pi_ref, [T] float32, 0 for tokens that aren't trained."""
        ...

    def step(self, totals: BatchTotals) -> Metrics:
        """Divide the gradients by the size of the batch, clip, update. With totals.num_loss_tokens 0 nothing was
        accumulated: only the version rises.

        Raises NonFiniteGradients, on all ranks, with the batch discarded.
        """
        ...

    def discard(self) -> None:
        """Drop the open batch."""

    def list_uncompiled(self) -> str:
        """What isn't compiled and why; empty: nothing. Rank 0 only, and only with train.compile=layers."""
        ...

    @property
    def sender(self) -> SendsWeights: ...

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs, at temperature 1, of all tokens but the first. Engines with these weights must give the same."""
        ...

    def save(self, directory: str) -> None:
        """Write model, optimizer and version; training waits."""

    def begin_save(self, directory: str) -> None:
        """Begin to write them from a copy; training may continue when this returns."""

    def saved(self) -> tuple[StoredFile, ...] | None:
        """The files that this rank wrote. None while it is writing."""
        ...

    def load(self, directory: str) -> int:
        """Load a saved state of any number of ranks. Returns its version, in optimizer steps."""
        ...

    def export(self, directory: str) -> None:
        """Write a Hugging Face directory that any engine can serve."""

    def average(self, directory: str, other: str, share: float) -> None:
        """Replace the weights of an export by `share` of theirs, and the rest of another model's. Rank 0 only."""

    def close(self) -> None:
        """Remove the transport's files and leave its group. Rank 0 only."""
