"""The sending end of a push on one rank: the weights in buckets, and the transport that takes them to engines."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from transformers import PreTrainedModel

from grmpipe.models.lm.checkpoint_names import CheckpointNames
from grmpipe.models.lm.lora import list_outgoing
from grmpipe.models.types import GroupLink, WeightBucket, WeightTensor
from grmpipe.models.weights.delta import DeltaSender
from grmpipe.models.weights.transport_ends import WeightTransport, open_transport
from grmpipe.models.weights.transports import transport_kind
from grmpipe.models.weights.weight_stream import WeightStream
from grmpipe.train.learner.learner_spec import LearnerSpec


class Delivery:
    """At most one is under way. Its error is raised by `end`, or dropped by `drop`."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def begin(self, deliver: Callable[[], None]) -> None:
        """Return at once. An earlier delivery that was not ended is waited for, and its error dropped."""
        self.drop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delivery")
        self._under_way = self._thread.submit(deliver)

    def end(self) -> None:
        """Wait for the delivery under way, if there is one. Raises its error."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def drop(self) -> None:
        """Wait until nothing is under way: a broadcast without a peer ends at its own timeout."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.exception()

    def close(self) -> None:
        self.drop()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


class WeightSender:
    """`bucket` and `broadcast` are collectives; rank 0 alone is asked for the rest."""

    def __init__(self, spec: LearnerSpec, model: PreTrainedModel, device: torch.device, rank: int) -> None:
        sent = list_outgoing(model, spec.lora, spec.sync_dtype) if spec.lora.learns else None
        names = CheckpointNames.of(model.config) if spec.checkpoint_names else None
        self._stream = WeightStream(model, spec.sync_dtype, spec.bucket_bytes, sent, names)
        sends = rank == 0 or transport_kind(spec.transport).every_rank
        self._transport = _open(spec, device) if sends else None
        self._delivery = Delivery()
        self._dtype = spec.sync_dtype

    def num_buckets(self) -> int:
        return self._stream.num_buckets

    def num_fixed_buckets(self) -> int:
        """The number of leading buckets that never change: an engine needs them only once."""
        return self._stream.num_fixed_buckets

    def connect(self, link: GroupLink | None) -> None:
        """Join the engines' group as its sender, on rank 0, and leave an older one. Does nothing without broadcasts."""
        assert self._transport is not None, "rank 0 sends"
        self._delivery.drop()  # of a push that failed
        self._transport.connect(link)

    def send_changes(self, wanted: bool) -> None:
        """From now on post what changed in a bucket since it was posted last, or all bytes of it."""
        assert isinstance(self._transport, DeltaSender), "sync.delta"
        self._transport.is_whole = not wanted

    def bucket(self, index: int) -> WeightBucket | None:
        """Unshard one bucket of the weights and post it. None on a rank that doesn't send."""
        bucket = self._stream.unshard_bucket(index)
        try:
            return self._transport.post(index, bucket) if self._transport is not None else None
        finally:
            bucket.drain()  # also if rank 0 failed: the others would wait for it

    def list_tensors(self) -> tuple[tuple[WeightTensor, ...], ...]:
        """The tensors of each bucket, without checksums."""
        return tuple(
            tuple(
                WeightTensor(name=name, dtype=self._dtype, shape=shape, checksum="")
                for name, shape in self._stream.list_shapes(index).items()
            )
            for index in range(self._stream.num_buckets)
        )

    def broadcast(self, first: int, version: int) -> dict[str, str]:
        """Send all buckets from `first` on to the group, on rank 0; a bucket is unsharded while the one before it is on
        its way. Returns the checksums by name; nothing on other ranks.

        Raises ConnectionError if the group breaks, once all buckets are unsharded: the other ranks know nothing of it.
        """
        checksums: dict[str, str] = {}
        failure: Exception | None = None
        for index in range(first, self._stream.num_buckets):
            bucket = self._stream.unshard_bucket(index)
            if self._transport is not None and failure is None:
                try:
                    posted = self._transport.post(index, bucket)
                    self._delivery.end()  # of the bucket before: the next one is posted into its memory
                    self._delivery.begin(partial(self._transport.deliver, index))
                    checksums |= {tensor.name: tensor.checksum for tensor in posted.tensors}
                except Exception as error:
                    failure = error
                    self.connect(None)  # the receivers wait for no more
            bucket.drain()
        if failure is not None:
            raise failure
        self._delivery.end()
        if self._transport is not None:
            self._transport.publish(checksums, version)
        return checksums

    def close(self) -> None:
        """Close the files and connections of the transport."""
        self._delivery.close()
        if self._transport is not None:
            self._transport.close()


def _open(spec: LearnerSpec, device: torch.device) -> WeightTransport:
    if spec.delta:
        return DeltaSender(spec.transport, spec.sync_dtype, spec.sync_dir)
    return open_transport(spec.transport, spec.sync_dtype, device, spec.sync_dir)
