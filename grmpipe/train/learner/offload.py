"""The learner on one rank, on a device that it shares in time with engines: which of its state is on the device. Trains
like any other learner.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from grmpipe.models.lm.offloaded_memory import OffloadedMemory, free_bytes
from grmpipe.models.types import OnDevice
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.weight_sender import WeightSender
from grmpipe.types import BatchTotals, Metrics, MicroBatch, OldPass


class OffloadingLearner(Learner):
    """A learner whose state waits on the host between its phases: weights, optimizer moments, reference. There are no
    gradients then: no phase ends within a batch.
    """

    def __init__(self, spec: LearnerSpec, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        super().__init__(spec, rank, world_size, init_method)
        self._offloaded_weights = OffloadedMemory()
        self._offloaded_rest = OffloadedMemory()

    def accumulate(self, micro_batch: MicroBatch, old: OldPass | None = None) -> Metrics:
        self._assert_has_all()
        return super().accumulate(micro_batch, old)

    def imitate(self, micro_batch: MicroBatch, totals: BatchTotals) -> None:
        self._assert_has_all()
        super().imitate(micro_batch, totals)

    def step(self, totals: BatchTotals) -> Metrics:
        self._assert_has_all()
        return super().step(totals)

    def save(self, directory: str) -> None:
        self._assert_has_all()
        super().save(directory)

    def begin_save(self, directory: str) -> None:
        self._assert_has_all()
        super().begin_save(directory)

    @property
    def sender(self) -> WeightSender:
        assert_on_device(self._offloaded_weights)
        return super().sender

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        assert_on_device(self._offloaded_weights)
        return super().score(token_ids)

    def keep_on_device(self, on_device: OnDevice) -> int:
        """Keep only `on_device` on the device. Returns the bytes that became free there; on a CPU everything stays on
        the host.
        """
        if self._device.type == "cpu":
            return 0
        before = free_bytes(self._device)
        self.move_state(on_device)
        return free_bytes(self._device) - before

    def move_state(self, on_device: OnDevice) -> None:
        """Move the state: first back to the device, then off it."""
        if on_device != "nothing":
            self._offloaded_weights.load_back()
        if on_device == "everything":
            self._offloaded_rest.load_back()
        if on_device != "everything" and not self._offloaded_rest.is_offloaded:
            self._offloaded_rest.offload(self._state_but_weights())
        if on_device == "nothing" and not self._offloaded_weights.is_offloaded:
            self._offloaded_weights.offload([*self._model.parameters(), *self._model.buffers()])

    def _assert_has_all(self) -> None:
        assert_on_device(self._offloaded_weights)
        assert_on_device(self._offloaded_rest)

    def _state_but_weights(self) -> Iterator[Tensor]:
        """The state that a push doesn't need."""
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if self._reference is not None:
            yield from self._reference.parameters()
            yield from self._reference.buffers()


def assert_on_device(memory: OffloadedMemory) -> None:
    assert not memory.is_offloaded, "what the learner needs now is on the host"
