"""A delivery in the background: what waits for it, and where its error goes."""

from __future__ import annotations

import threading

import pytest

from grmpipe.train.learner.weight_sender import Delivery


def test_caller_continues_during_a_delivery() -> None:
    delivery, may_end, ended = Delivery(), threading.Event(), threading.Event()

    def deliver() -> None:
        assert may_end.wait(10)
        ended.set()

    delivery.begin(deliver)
    assert not ended.is_set()
    may_end.set()
    delivery.end()
    assert ended.is_set()
    delivery.close()


def test_an_error_is_raised_once_where_the_delivery_ends() -> None:
    delivery = Delivery()
    delivery.begin(lambda: [][0])
    with pytest.raises(IndexError):
        delivery.end()
    delivery.end()
    delivery.close()


def test_a_new_delivery_waits_for_one_whose_push_failed_and_drops_its_error() -> None:
    delivery, order = Delivery(), []

    def fail() -> None:
        order.append("old")
        raise ConnectionError("gone")

    delivery.begin(fail)
    delivery.begin(lambda: order.append("new"))
    delivery.end()
    assert order == ["old", "new"]
    delivery.close()
