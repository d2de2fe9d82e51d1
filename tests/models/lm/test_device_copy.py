"""Arrays arrive as they are, together."""

from __future__ import annotations

import numpy as np
import torch

from grmpipe.models.lm.device_copy import copy_to_device


def test_arrays_arrive_bit_for_bit_also_empty_read_only_and_strided_ones() -> None:
    draw = np.random.default_rng(0)
    arrays = [
        draw.integers(-(2**60), 2**60, 5),
        draw.normal(size=(3, 7)).astype(np.float32),
        np.zeros((0, 4), np.int64),
        draw.integers(0, 2, 9).astype(np.bool_),
        draw.integers(-1, 99, (4, 2, 3)).astype(np.int16),
        np.array([np.nan, -0.0, np.inf], np.float32),
        draw.normal(size=(6, 4))[::2],
    ]
    arrays[0].flags.writeable = False  # as out of an object store
    copies = copy_to_device(arrays, torch.device("cpu"))
    for array, copy in zip(arrays, copies, strict=True):
        assert (copy.shape, copy.numpy().dtype) == (array.shape, array.dtype)
        assert copy.numpy().tobytes() == array.tobytes()
    copies[1].zero_()
    assert arrays[1].any(), "they are copies"
    assert copy_to_device([], torch.device("cpu")) == []
