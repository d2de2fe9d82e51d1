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
    body, num_received = bytearray(), 0
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:  # raw: httpx would decompress a whole chunk, whatever its size
        num_received += len(chunk)
        room = max_bytes - len(body) + 1
        body += chunk[:room] if unpack is None else unpack(chunk, room)
        if max(len(body), num_received) > max_bytes:  # received: empty members could come without end
            raise BadBody(f"an answer of more than {max_bytes} bytes")
    if unpack is not None and body and not unpack.complete:
        raise BadBody("a truncated compressed answer")
    return bytes(body)


class Gunzip:
    """Decompresses gzip, up to a limit of bytes: what exceeds it is never decompressed. A body may be several members,
    one after the other (RFC 1952, 2.2), with zeros behind the last.
    """

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(GZIP_WBITS)

    @property
    def complete(self) -> bool:
        return self._decoder.eof

    def __call__(self, chunk: bytes, max_bytes: int) -> bytes:
        body = bytearray()
        try:
            while chunk and len(body) < max_bytes:
                if self._decoder.eof:
                    if not (chunk := chunk.lstrip(b"\0")):
                        break
                    self._decoder = zlib.decompressobj(GZIP_WBITS)
                body += self._decoder.decompress(chunk, max_bytes - len(body))
                chunk = self._decoder.unused_data
        except zlib.error as error:
            raise BadBody(f"a compressed answer that can't be read: {error}") from None
        return bytes(body)
