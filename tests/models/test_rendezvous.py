"""The store of a process group: it listens at one address, which no other machine reaches."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from forks import Forked

from grmpipe.models.rendezvous import address_towards, find_interface, store_at

SCRIPT = Path(__file__).with_name("listening_process.py")


def outward() -> str:
    """The machine's own address towards outside; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no way out")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("where", ["loopback", "outward"])
def test_process_groups_listen_at_their_meeting_place_alone(where: str, forked: type[Forked]) -> None:
    address = "127.0.0.1" if where == "loopback" else outward()
    done = forked(SCRIPT, address)
    assert done.wait(120) == 0, done.output[-3000:]
    assert json.loads(done.output.splitlines()[-1]) == {"broadcast": [address], "ranks": [address]}


def test_an_address_that_is_taken_or_of_another_machine_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port}: "):
            store_at("127.0.0.1", port, 0, 1, timedelta(seconds=1))
    with pytest.raises(ConnectionError, match=r"203\.0\.113\.7:29500: "):
        store_at("203.0.113.7", 29500, 0, 1, timedelta(seconds=1))


def test_the_interface_of_an_address_is_known_and_of_a_strange_one_is_not() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.7") is None
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
