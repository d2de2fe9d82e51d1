"""The collector runs rarely within the context, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from grmpipe.scheduler import gc_tuning
from grmpipe.scheduler.gc_tuning import INFREQUENT, infrequent_gc, is_frozen


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc_tuning, "is_frozen", is_frozen)
    gc.unfreeze()  # the tests' own objects
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_collector_is_restored_afterwards_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), infrequent_gc():
        assert gc.get_threshold() == INFREQUENT
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_program_froze_stays_frozen_after_its_run() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with infrequent_gc():
        pass
    assert gc.get_freeze_count() >= frozen > 0
