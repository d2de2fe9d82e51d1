"""Makes Intel's MKL add in an order that doesn't depend on the size of a product. Loads no library."""

import os

VARIABLE, KERNELS = "MKL_CBWR", "COMPATIBLE"  # which MKL reads at its first call; AVX2,STRICT is faster, for short rows


def choose_repeatable_kernels() -> None:
    """For this process, if it has multiplied nothing so far, and for those that it starts. A user's choice stays."""
    os.environ.setdefault(VARIABLE, KERNELS)
