"""The body of an HTTP response, decompressed, up to a limit of bytes. Never holds more than the limit and one chunk."""

import zlib

import httpx

PLAIN = frozenset({"", "identity"})
GZIP = frozenset({"gzip", "x-gzip"})
ACCEPTED = "gzip"  # the only encoding that is read
GZIP_WBITS = 16 + zlib.MAX_WBITS


class BadBody(Exception):
    """Larger than the limit, cut off, or in an encoding that was not requested."""


async def read_bounded(response: httpx.Response, max_bytes: int) -> bytes:
    """The body of a streamed response. Raises BadBody, or the httpx.RequestError of a failed connection."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in PLAIN | GZIP:
        raise BadBody(f"an answer compressed as {encoding[:40]!r}, which wasn't requested")
    unpack = Gunzip() if encoding in GZIP else None
    body = bytearray()
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:  # raw: httpx would decompress a whole chunk, whatever its size
        room = max_bytes - len(body) + 1
        body += chunk[:room] if unpack is None else unpack(chunk, room)
        if len(body) > max_bytes:
            raise BadBody(f"an answer of more than {max_bytes} bytes")
    if unpack is not None and body and not unpack.complete:
        raise BadBody("a truncated compressed answer")
    return bytes(body)


class Gunzip:
    """Decompresses gzip, up to a limit of bytes: what exceeds it is never decompressed."""

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
