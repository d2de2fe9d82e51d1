"""The batches of steps whose numbers were not finite, as a file to replay them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from grmpipe.types import JudgedGroup


def save_failed_batch(batch: Sequence[JudgedGroup], path: Path) -> str:
    """Append the batch of a step with non-finite numbers, to replay it. Returns a line for the user."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(group), default=np.ndarray.tolist) + "\n" for group in batch)
    except OSError as refused:  # a full disk must not hide the first cause
        return f"\nthe batch could not be written to {path}: {refused.strerror}"
    return f"\nthe batch is in {path}, one group per line"
