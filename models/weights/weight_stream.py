"""A model, sharded or not, as a stream of unsharded tensors in buckets."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grmpipe.models.lm.checkpoint_names import CheckpointNames
from grmpipe.models.lm.unshard import Outgoing, Piece, has_even_rows, list_pieces, split_rows
from grmpipe.models.weights.bucket_size import choose_bucket_bytes
from grmpipe.models.weights.transport_ends import Shape, UnshardedBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A piece as sent, or some of its experts: with the names of a checkpoint it may be several tensors."""

    name: str  # the piece's
    shapes: dict[str, Shape]
    names: CheckpointNames | None
    unsharded: Callable[[], Tensor]
    experts: tuple[int, ...] | None = None  # None: all, or none

    @property
    def num_values(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def tensors(self) -> Iterator[Tensor]:
        whole = self.unsharded()
        if self.names is None:
            yield whole
            return
        converted = self.names.convert(self.name, whole, self.experts)
        yield from (converted[name] for name in self.shapes)


class WeightStream:
    """The buckets of a model: about `bucket_bytes` each, in the order of the model; those of fixed tensors first.

    A tied head is left out: it is the embedding, and the receiver ties it too.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: str,
        bucket_bytes: int,
        outgoing: Outgoing | None = None,
        names: CheckpointNames | None = None,
    ) -> None:
        """bucket_bytes: 0: by the size of the model. outgoing: the tensors to send; None: all of the model, unchanged.
        names: tensor names as in checkpoints, for engines that need them; None: the model's own.
        """
        pieces = outgoing or Outgoing(changing=list(list_pieces(model, dtype)))
        itemsize = getattr(torch, dtype).itemsize
        num_bytes = itemsize * sum(piece.tensor.numel() for piece in (*pieces.fixed, *pieces.changing))
        size = choose_bucket_bytes(bucket_bytes, num_bytes)
        fixed, changing = (
            list(_plan([sent for piece in some for sent in _sent(piece, names, dtype, size)], itemsize, size))
            for some in (pieces.fixed, pieces.changing)
        )
        self.num_fixed_buckets = len(fixed)
        self._buckets = [*fixed, *changing]

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def list_shapes(self, index: int) -> dict[str, Shape]:
        """The tensors of a bucket, by name."""
        return {name: shape for sent in self._buckets[index] for name, shape in sent.shapes.items()}

    def unshard_bucket(self, index: int) -> UnshardedBucket:
        """One bucket, one whole tensor at a time. A collective: every rank reads all its tensors, or drains it."""
        bucket = self._buckets[index]
        return UnshardedBucket(
            names=tuple(self.list_shapes(index)),
            shapes=tuple(self.list_shapes(index).values()),
            tensors=(tensor for sent in bucket for tensor in sent.tensors()),
        )


def _sent(piece: Piece, names: CheckpointNames | None, dtype: str, bucket_bytes: int) -> Iterator[_Sent]:
    """A piece as sent. Experts that fill more than a bucket come a few at a time, if the receiver knows each of them by
    name: a layer's experts are never whole on any rank.
    """
    shape = tuple(piece.tensor.shape)
    shapes = names.shapes(piece.name, shape) if names else {piece.name: shape}
    num_bytes = piece.tensor.numel() * getattr(torch, dtype).itemsize
    divides = num_bytes > bucket_bytes and has_even_rows(piece.tensor)
    if names is None or not divides or not names.separates(piece.name, shape):
        yield _Sent(name=piece.name, shapes=shapes, names=names, unsharded=piece.unsharded)
        return
    for rows in split_rows(piece.tensor, dtype, bucket_bytes * shape[0] // num_bytes):
        some = names.shapes(piece.name, (len(rows.numbers), *shape[1:]), rows.numbers)
        yield _Sent(name=piece.name, shapes=some, names=names, unsharded=rows.unsharded, experts=rows.numbers)


def _plan(pieces: Sequence[_Sent], itemsize: int, bucket_bytes: int) -> Iterator[list[_Sent]]:
    """Fill a bucket until the next piece doesn't fit. A larger piece gets its own bucket."""
    bucket: list[_Sent] = []
    filled = 0
    for sent in pieces:
        size = sent.num_values * itemsize
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(sent)
        filled += size
    if bucket:
        yield bucket
