"""The connections of an HTTP client with many requests in flight."""

import time
from collections import deque
from collections.abc import AsyncIterator

import httpx

from grmpipe.models.engines.network import NetworkPath

IDLE_S = 2.0  # below the 5 s after which many servers close: a request at that moment would look like their death


class Connections(httpx.AsyncBaseTransport):
    """Gives each request a connection of its own, the one that was idle last, or a new one. The caller bounds how many
    there are.

    httpx's pool looks at every connection whenever a request begins or ends: with 500 in flight that took 34 ms of CPU
    for each. Here each connection is a pool of one.
    """

    def __init__(self, path: NetworkPath) -> None:
        self._path = path
        self._tls = path.tls or httpx.create_ssl_context(trust_env=False)  # once: it reads all certificates
        self._idle = deque[tuple[float, httpx.AsyncHTTPTransport]]()  # since when, the oldest first

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connection = self._idle.pop()[1] if self._idle else self._open()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, connection, self)
        return response

    async def give_back(self, connection: httpx.AsyncHTTPTransport) -> None:
        now = time.monotonic()
        self._idle.append((now, connection))
        while self._idle and now - self._idle[0][0] > IDLE_S:  # others take some while one is closed
            await self._idle.popleft()[1].aclose()

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop()[1].aclose()

    def _open(self) -> httpx.AsyncHTTPTransport:
        one = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=one, proxy=self._path.proxy)


class _Body(httpx.AsyncByteStream):
    """The body of a response, whose end frees its connection."""

    def __init__(
        self, body: httpx.AsyncByteStream, connection: httpx.AsyncHTTPTransport, connections: Connections
    ) -> None:
        self._body = body
        self._connection = connection
        self._connections = connections

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        except BaseException:
            await self._connection.aclose()
            raise
        await self._connections.give_back(self._connection)
