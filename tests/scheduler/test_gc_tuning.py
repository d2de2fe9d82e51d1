"""The collector runs rarely within the context, and as before afterwards."""

from __future__ import annotations

import gc

import pytest

from scheduler.gc_tuning import INFREQUENT, infrequent_gc


def test_collector_is_restored_afterwards_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), infrequent_gc():
        assert gc.get_threshold() == INFREQUENT
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
