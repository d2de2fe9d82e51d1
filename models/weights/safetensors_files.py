"""Weights through safetensors files in a folder that learner and engines can open: both ends."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grmpipe.models.bucket_memory import BucketMemory
from grmpipe.models.types import SafetensorsFile, WeightBucket, WeightTensor
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transport_ends import CPU, UnshardedBucket, WeightTransport, open_bucket
from grmpipe.models.weights.weight_files import WeightFile, sweep


class SafetensorsFiles(WeightTransport):
    """Two files in a folder that every engine can open, written alternately."""

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        if not folder:
            raise ValueError("sync.transport: disk needs a folder that learner and engines can open; give sync_dir")
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        sweep(place)
        self._next, self._other = (WeightFile(place, ".safetensors") for _ in range(2))
        self._arena = BucketMemory(CPU)

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        file = self._next
        self._next, self._other = self._other, self._next
        sent = self._arena.take(self._dtypes(bucket), bucket.shapes)
        self._fill(sent, bucket)
        save_file(dict(zip(bucket.names, sent, strict=True)), file.path)
        return self._announce(bucket, sent, SafetensorsFile(path=str(file.path)))

    def close(self) -> None:
        self._next.close()
        self._other.close()


@open_bucket.register
def _(payload: SafetensorsFile, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> list[Tensor]:
    came = []
    try:
        with safe_open(payload.path, framework="pt", device="cpu") as file:
            for tensor in tensors:
                came.append(file.get_tensor(tensor.name))
    except SafetensorError as error:
        raise ValueError(f"weights: {payload.path} can't be read at {tensors[len(came)].name!r}: {error}") from None
    return came
