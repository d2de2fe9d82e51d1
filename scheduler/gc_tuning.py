"""Python's collector of cyclic garbage, told that much lives and little of it is garbage. Frees nothing itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

INFREQUENT = 50_000, 20, 20  # new objects to a look at them; looks to one at those that survived one; at all


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """For a pipeline: tens of thousands of tasks and groups are in flight, and end without cycles. What lives already
    is never looked at again; what is new, a seventieth as often."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*INFREQUENT)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
