"""Joining a Ray that isn't there. No Ray starts."""

from __future__ import annotations

import socket
import time

import pytest

from scheduler.placement import ClusterConfig
from scheduler.ray_start import init_ray


def test_an_address_where_nobody_listens_is_told_at_once() -> None:
    """Ray itself would ask for half a minute."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    began_s = time.monotonic()
    with pytest.raises(ValueError, match=rf"^cluster\.address: nobody listens at {address} .*cluster\.address=null"):
        init_ray(ClusterConfig(address=address))
    assert time.monotonic() - began_s < 5
