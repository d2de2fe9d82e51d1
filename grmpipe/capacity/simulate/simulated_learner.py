"""The ranks of a learner or a critic that only take time. Their driver side is the real one."""

from collections.abc import Sequence

import numpy as np

from grmpipe.capacity.cost import LearnerSpeed
from grmpipe.capacity.simulate.simulated_process import SimulatedProcess
from grmpipe.models.checksum import checksum
from grmpipe.models.engines.simulated.simulated_rate import SharedDevice
from grmpipe.models.types import InlineBytes, WeightBucket, WeightTensor
from grmpipe.train.scalar.scalar_batch import PackedSequences
from grmpipe.types import MicroBatch, OldPass


class SimulatedRanks(SimulatedProcess):
    """An ActorGroup: all ranks take part in every call, one call at a time. Pushes of weights are work too.

    device: rank 0's, if others share it; the other ranks behave the same. cp: the ranks that share each sample.
    reference_in_loss: `accumulate` has a pass of the reference.
    """

    def __init__(
        self,
        num_ranks: int,
        speed: LearnerSpeed,
        sync_s: float,
        device: SharedDevice | None = None,
        switch_s: float = 0.0,
        cp: int = 1,
        reference_in_loss: bool = False,
    ) -> None:
        super().__init__(device)
        self._cp = cp
        self._num_ranks = num_ranks
        self._speed = speed
        self._accumulate_s = speed.token_s + (speed.forward_s if reference_in_loss else 0.0)  # per packed token
        self._sync_s = sync_s
        self._switch_s = switch_s

    @property
    def size(self) -> int:
        return self._num_ranks

    async def call(self, rank: int, method: str, *args: object) -> object:
        return (await self._answer(method, [args] * self._num_ranks))[rank]

    async def call_all(self, method: str, *args: object) -> list[object]:
        return await self._answer(method, [args] * self._num_ranks)

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        return await self._answer(method, args_by_rank)

    async def close(self) -> None:
        return None

    async def _answer(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        async with self._turn:
            match method:
                case "accumulate":
                    await self._spend(self._most_tokens(args_by_rank) * self._accumulate_s)
                    return [{}] * self._num_ranks
                case "imitate":
                    await self._spend(self._most_tokens(args_by_rank) * self._speed.token_s)
                    return [None] * self._num_ranks
                case "scores":
                    await self._spend(self._most_tokens(args_by_rank) * self._speed.forward_s)
                    return [np.zeros(num_tokens(args[0]), dtype=np.float32) for args in args_by_rank]
                case "reference_logprobs":
                    await self._spend(self._most_tokens(args_by_rank) * self._speed.forward_s)
                    return [minus_ones(args) for args in args_by_rank]
                case "old_pass":
                    await self._spend(self._most_tokens(args_by_rank) * self._speed.forward_s)
                    return [OldPass(logprobs_T=minus_ones(args)) for args in args_by_rank]
                case "step":
                    await self._spend(self._speed.step_s)
                    return [{}] * self._num_ranks
                case "sender.list_tensors":  # its bucket isn't broadcast
                    return [(BUCKET.tensors,)] * self._num_ranks
                case "sender.broadcast":
                    await self._spend(self._sync_s)
                    return [{tensor.name: tensor.checksum for tensor in BUCKET.tensors}] * self._num_ranks
                case "sender.num_buckets":
                    return [1] * self._num_ranks
                case "sender.num_fixed_buckets":
                    return [0] * self._num_ranks
                case "sender.bucket":
                    await self._spend(self._sync_s)
                    return [BUCKET, *[None] * (self._num_ranks - 1)]  # rank 0 sends
                case "score":
                    (token_ids,) = args_by_rank[0]
                    assert isinstance(token_ids, tuple)
                    return [(-1.0,) * (len(token_ids) - 1)] * self._num_ranks
                case "keep_on_device":  # takes as long as a change of engines on a slot: about as many bytes
                    await self._spend(self._switch_s)
                    return [0] * self._num_ranks
                case "expect" | "discard" | "close" | "sender.connect":
                    return [None] * self._num_ranks
        raise NotImplementedError(f"a simulated learner doesn't {method}")

    def _most_tokens(self, args_by_rank: Sequence[tuple[object, ...]]) -> int:
        """The tokens that a pass takes the time of: all wait for the rank with most work; speeds are those of all ranks
        together.
        """
        return max(num_tokens(args[0]) for args in args_by_rank) * (self._num_ranks // self._cp)


def num_tokens(micro_batch: object) -> int:
    assert isinstance(micro_batch, MicroBatch | PackedSequences)
    return len(micro_batch.token_ids_T)


def minus_ones(args: tuple[object, ...]) -> np.ndarray:
    """A log-prob for each token of a micro-batch, [T] float32."""
    return np.full(num_tokens(args[0]), -1.0, dtype=np.float32)


WEIGHTS = np.zeros(4, dtype=np.uint8)
BUCKET = WeightBucket(
    tensors=(WeightTensor(name="weights", dtype="float32", shape=(1,), checksum=checksum(WEIGHTS)),),
    payload=InlineBytes(data=(WEIGHTS,)),
)
