"""Loads received weight buckets into a model, in place, by Hugging Face name. Never sends, never casts on the way
in.
"""

import torch
from torch import Tensor, nn

from grmpipe.models.types import GroupLink, WeightBucket, WeightTensor
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors


class WeightInbox:
    """Loads buckets, and keeps the checksums of the model's resulting weights until they are collected."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._group = BroadcastLink(device)
        self._checksums: dict[str, str] = {}

    def begin(self, link: GroupLink | None) -> None:
        """Begin a push: drop an unfinished one. Join its group, leave an older one."""
        self._checksums = {}
        self._group.join(link)

    def load(self, bucket: WeightBucket) -> None:
        """Load all of a bucket, or nothing with a ValueError that names the tensor. A tied weight has both its
        names.
        """
        try:
            held = self._model.state_dict()
            targets = [_held_tensor(held, tensor) for tensor in bucket.tensors]
            with receive_tensors(bucket, self._group) as tensors:
                applied = [
                    (announced, _applied(target, source))
                    for target, (announced, source) in zip(targets, tensors, strict=True)
                ]
                checksums = compute_checksums(applied)
        except BaseException:
            self._group.leave()  # otherwise the sender waits for us until its timeout
            raise
        self._checksums |= checksums

    def collect_checksums(self) -> dict[str, str]:
        """The checksums of all tensors since the push began."""
        collected, self._checksums = self._checksums, {}
        return collected

    def close(self) -> None:
        self._group.leave()


def _applied(target: Tensor, source: Tensor) -> Tensor:
    """The model's tensor, in the type and on the device of its source: its bytes must be the source's.

    If the model's type or device can't give the bytes back, they are compared here and the source is returned.
    """
    target.copy_(source)
    if target.device == source.device and torch.promote_types(source.dtype, target.dtype) == target.dtype:
        return target.to(source.dtype)
    if torch.equal(target, source.to(target.device, target.dtype)):
        return source
    return target.to(source.device, source.dtype)


def _held_tensor(held: dict[str, Tensor], tensor: WeightTensor) -> Tensor:
    target = held.get(tensor.name)
    if target is None:
        raise ValueError(f"weights: the engine's model has no tensor {tensor.name!r}; is it the same architecture?")
    if tuple(target.shape) != tensor.shape:
        raise ValueError(f"weights: {tensor.name!r} arrived as {tensor.shape}, the engine has {tuple(target.shape)}")
    return target
