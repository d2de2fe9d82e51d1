"""The state of a group after a failed broadcast. For successful ones see test_receiving.py and the cluster's tests."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from grmpipe.models.types import GroupLink
from grmpipe.models.weights import process_group
from grmpipe.models.weights.process_group import BroadcastLink

LINK = GroupLink(name="one", backend="gloo", address="127.0.0.1", port=1, rank=0, world_size=2, timeout_s=1.0)


@pytest.mark.parametrize("joined_since", [False, True])
def test_a_failure_leaves_its_own_group_and_none_that_was_joined_since(
    joined_since: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that gave up waiting starts again while its old broadcast still hangs in another thread."""
    monkeypatch.setattr(process_group, "_meet", lambda link, rank, device: (object(), object()))
    group = BroadcastLink()
    group.join(LINK)

    def fail_late(*args: object) -> str:
        if joined_since:
            group.join(replace(LINK, name="two"))
        return "the other end is gone"

    monkeypatch.setattr(process_group, "_failure", fail_late)
    with pytest.raises(ConnectionError, match=r"sending 'w' in the group 'one' of 2 failed: the other end is gone"):
        group.send(["w"], torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(process_group, "_failure", lambda *args: None)
    if joined_since:
        group.send(["w"], torch.zeros(1, dtype=torch.uint8))
    else:
        with pytest.raises(ConnectionError, match="no process group was joined"):
            group.send(["w"], torch.zeros(1, dtype=torch.uint8))


def test_a_receiver_in_the_middle_of_a_bucket_ends_soon_after_its_sender_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo doesn't tell it: it would wait for its whole time limit."""
    monkeypatch.setattr(process_group, "LOOK_EVERY_S", 0.01)
    store, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()
    waits: list[float] = []

    class Hung:
        """A broadcast without an end, whose sender leaves after the receiver has looked for it twice."""

        def broadcast(self, *args: object) -> Hung:
            return self

        def wait(self, limit: timedelta) -> None:
            waits.append(limit.total_seconds())
            if len(waits) == 3:
                store.close()
            ended.wait(limit.total_seconds())
            raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return False

    monkeypatch.setattr(process_group, "_meet", lambda link, rank, device: (Hung(), object()))
    group = BroadcastLink()
    group.join(replace(LINK, port=store.getsockname()[1], rank=1, timeout_s=600.0))
    with pytest.raises(ConnectionError, match=r"receiving 'w' in the group 'one' of 2 failed: the sender left"):
        group.receive(["w"], [torch.uint8], [(4,)])
    ended.set()  # for the thread that keeps the broadcast until its limit
    assert len(waits) >= 3 and set(waits[:3]) == {0.01}
    assert group.name is None, "another group may be joined"
