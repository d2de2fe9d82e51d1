"""The connections of a client with many requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import httpx
import pytest
from aiohttp import web

from grmpipe.models.engines import connections
from grmpipe.models.engines.connections import Connections
from grmpipe.models.engines.network import NetworkPath


class Server:
    """Counts its connections; answers /slow/x after x seconds, and breaks /broken off."""

    def __init__(self) -> None:
        self.peers = Counter[object]()

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_get("/{kind}/{seconds}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.peers[request.transport.get_extra_info("peername")] += 1
        await asyncio.sleep(float(request.match_info["seconds"]))
        if request.match_info["kind"] == "broken":
            request.transport.abort()
        return web.Response(text="x" * 100_000)


def test_each_request_in_flight_has_its_connection_which_the_next_one_uses_again() -> None:
    async def run() -> None:
        server = Server()
        async with server as url, httpx.AsyncClient(transport=Connections(NetworkPath()), timeout=30) as client:
            for _ in range(2):
                answers = await asyncio.gather(*(client.get(f"{url}/slow/0.3") for _ in range(20)))
                assert all(len(answer.content) == 100_000 for answer in answers)
            assert len(server.peers) == 20 and set(server.peers.values()) == {2}

    asyncio.run(run())


def test_a_connection_that_failed_or_was_left_is_used_by_nobody() -> None:
    async def run() -> None:
        server, transport = Server(), Connections(NetworkPath())
        async with server as url, httpx.AsyncClient(transport=transport, timeout=30) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"{url}/broken/0")
            left = asyncio.create_task(client.get(f"{url}/slow/60"))
            await asyncio.sleep(0.1)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            async with client.stream("GET", f"{url}/slow/0") as unread:
                assert unread.status_code == 200
            for _ in range(3):
                assert len((await client.get(f"{url}/slow/0")).content) == 100_000
            assert len(transport._idle) == 1

    asyncio.run(run())


def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.2)

    async def run() -> None:
        transport = Connections(NetworkPath())
        async with Server() as url, httpx.AsyncClient(transport=transport, timeout=30) as client:
            await asyncio.gather(*(client.get(f"{url}/slow/0.1") for _ in range(8)))
            assert len(transport._idle) == 8
            await asyncio.sleep(0.3)
            await client.get(f"{url}/slow/0")
            assert len(transport._idle) == 1
        assert not transport._idle

    asyncio.run(run())


def test_a_request_may_take_the_last_idle_connection_while_an_old_one_is_closed() -> None:
    class Slow:
        """A connection whose end takes a moment."""

        async def aclose(self) -> None:
            await asyncio.sleep(0)
            transport._idle.clear()  # what a request in between took

    transport = Connections(NetworkPath())
    transport._idle.extend([(-60.0, Slow()), (-60.0, Slow())])  # type: ignore[list-item]
    asyncio.run(transport.give_back(Slow()))  # type: ignore[arg-type]
    assert not transport._idle


def test_a_request_costs_no_more_with_500_in_flight() -> None:
    async def run() -> float:
        async with Server() as url, httpx.AsyncClient(transport=Connections(NetworkPath()), timeout=30) as client:
            waiting = [asyncio.create_task(client.get(f"{url}/slow/3")) for _ in range(500)]
            await asyncio.sleep(1.5)
            began_s = time.process_time()
            for _ in range(20):
                await client.get(f"{url}/slow/0")
            used_s = time.process_time() - began_s
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return used_s / 20

    assert asyncio.run(run()) < 0.02, "34 ms by httpx's own pool, of both ends here"
