"""The body of an HTTP answer, decompressed, up to a bound of bytes. Never holds more than the bound and one chunk."""

from __future__ import annotations

import zlib

import httpx

PLAIN = frozenset({"", "identity"})
GZIP = frozenset({"gzip", "x-gzip"})
ACCEPTED = "gzip"  # what to ask for: nothing else is read
GZIP_WBITS = 16 + zlib.MAX_WBITS


class BadBody(Exception):
    """Larger than the bound, cut off, or packed in a way that nobody asked for."""


async def read_bounded(response: httpx.Response, max_bytes: int) -> bytes:
    """Of a streamed answer. Raises BadBody, or the httpx.RequestError of a connection that fails."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in PLAIN | GZIP:
        raise BadBody(f"an answer compressed as {encoding[:40]!r}, which wasn't requested")
    unpack = Gunzip() if encoding in GZIP else None
    body = bytearray()
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:  # as it came: httpx unpacks a chunk whole, whatever becomes of it
        room = max_bytes - len(body) + 1
        body += chunk[:room] if unpack is None else unpack(chunk, room)
        if len(body) > max_bytes:
            raise BadBody(f"an answer of more than {max_bytes} bytes")
    if unpack is not None and body and not unpack.complete:
        raise BadBody("a truncated compressed answer")
    return bytes(body)


class Gunzip:
    """Chunks of gzip in, at most so many bytes out: what lies beyond is never unpacked."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(GZIP_WBITS)

    @property
    def complete(self) -> bool:
        return self._decoder.eof

    def __call__(self, chunk: bytes, max_bytes: int) -> bytes:
        try:
            return self._decoder.decompress(chunk, max_bytes)
        except zlib.error as error:
            raise BadBody(f"a compressed answer that can't be read: {error}") from None
