"""Arrays of the host on a device, in one copy."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grmpipe.models.bucket_memory import room_for, views


def copy_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, in order, within one piece of memory. From pinned memory, so that nobody waits: a copy
    each would wait for all that the device still has to do.
    """
    dtypes = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    shapes = [array.shape for array in arrays]
    host_B = torch.empty(room_for(dtypes, shapes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for target, array in zip(views(host_B, dtypes, shapes), arrays, strict=True):
        np.copyto(target.numpy(), array)
    return views(host_B.to(device, non_blocking=True), dtypes, shapes)
