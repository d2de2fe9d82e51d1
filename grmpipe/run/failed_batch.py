"""The batch of a step whose numbers were not finite, as a file to replay it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from grmpipe.types import JudgedGroup


def save_failed_batch(batch: Sequence[JudgedGroup], path: Path) -> str:
    """Save the batch of a step with non-finite numbers, to replay it. Returns a line for the user."""
    try:
        path.write_text("".join(json.dumps(asdict(group)) + "\n" for group in batch), "utf-8")
    except OSError as refused:  # a full disk must not hide the first cause
        return f"\nthe batch could not be written to {path}: {refused.strerror}"
    return f"\nthe batch is in {path}, one group per line"
