"""The critic on one rank: values, gradients of value losses, optimizer steps."""

from dataclasses import dataclass

from grmpipe.algorithm.value_loss import value_loss
from grmpipe.models.lm.device_copy import copy_to_device
from grmpipe.train.critic.value_samples import ValueBatch
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.train.scalar.scalar_rank import ScalarRank, ScalarSpec
from grmpipe.types import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec(ScalarSpec):
    """What a rank needs to build its critic. value_clip: in reward units; None disables clipping."""

    value_clip: float | None


class CriticLearner(ScalarRank):
    """One rank of the critic. Its methods are collectives: all ranks call the same ones in the same order.

    scores() returns values; accumulate() runs forward and backward on micro-batches, step() ends their batch.
    """

    def __init__(self, spec: CriticSpec, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        super().__init__(spec, rank, world_size, init_method)
        self._clip = spec.value_clip

    def accumulate(self, batch: ValueBatch) -> None:
        """Add the gradient of this batch's summed loss."""
        arrays = [batch.weights_T, batch.values_T, batch.returns_T]
        weights_T, values_T, returns_T = copy_to_device(arrays, self._device)
        loss_T, clipped_T = value_loss(self._forward(batch), values_T, returns_T, self._clip)
        loss = (weights_T * loss_T).sum()
        loss.backward()
        self._count(value_loss=loss, clip_share=(weights_T * clipped_T).sum(), weight=weights_T.sum())

    def step(self) -> Metrics:
        """Divide the accumulated gradients by the tokens of all ranks, clip, update. An update that no rank accumulated
        anything for is skipped: the version counts it, and there are no metrics.

        Raises NonFiniteGradients, on all ranks, with the batch discarded.
        """
        if not self._sums:  # on all ranks alike: each round reaches all of them
            self._version += 1
            return {}
        try:
            means, update_metrics = self._update()
        except NonFiniteGradients as error:
            raise NonFiniteGradients(error.norm, "critic.lr") from None
        learnt = {f"critic/{name}": value for name, value in means.items()}
        return learnt | {f"critic/{name.removeprefix('train/')}": value for name, value in update_metrics.items()}
