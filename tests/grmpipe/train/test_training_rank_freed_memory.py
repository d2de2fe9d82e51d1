import resource
import sys

import numpy as np
import pytest

from grmpipe.train.training_rank import keep_freed_memory

BYTES = 3 << 20  # below the size from which numpy asks for huge pages


def count_page_faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(BYTES, dtype=np.uint8) for _ in range(40)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del arrays
    return faults


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_memory_that_a_step_freed_costs_the_next_one_no_page_faults() -> None:
    keep_freed_memory()
    count_page_faults()
    assert count_page_faults() < 40 * BYTES / 4096 / 4
