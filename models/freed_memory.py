"""Memory of freed CPU tensors, kept in the process for the next ones. Needs no torch."""

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
KEPT_BYTES = 256 << 20
LARGEST_BYTES = 32 << 20  # in a tensor; glibc takes no more


def keep_freed_memory() -> None:
    """Let the process keep up to KEPT_BYTES of freed memory. A training step frees all its activations: given back to
    the system, they cost a page fault for each 4 KiB when the next step needs them. No effect without glibc.
    """
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
