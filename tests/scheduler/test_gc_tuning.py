"""The collector works seldom meanwhile, and as before afterwards."""

from __future__ import annotations

import gc

import pytest

from scheduler.gc_tuning import SELDOM, seldom_collected


def test_the_collector_is_as_it_was_afterwards_whatever_happened() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), seldom_collected():
        assert gc.get_threshold() == SELDOM
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
