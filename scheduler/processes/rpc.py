"""Calls between two processes: over a private Unix socket on one machine, over TCP with a key between two.

A call over Ray passes several threads at either end, and engines and learners are called tens of times per step, so
they use this where possible. Only values of the types in wire_types.py are sent or decoded.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import itertools
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from grmpipe.scheduler.processes.wire_types import (
    Dialect,
    RemoteError,
    args_type,
    decoder,
    encoder,
    rebuild_error,
    remote_error,
)

# A frame is the number of its call, its kind, the length of its body, and the body. The kind of a call is the place of
# its method in the dialect; that of an answer is ANSWERED or FAILED.
HEADER = struct.Struct("!QHQ")
MAX_PATH_BYTES = 107  # the kernel's limit for a socket
ANSWERED, FAILED = range(2)
NONCE_BYTES, PROOF_BYTES = 32, 32
HANDSHAKE_S = 5.0
# A machine that is gone without a word breaks the connection within a minute, as Ray would notice it.
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}
Decoder = msgspec.msgpack.Decoder[Any]
Frame = tuple[int, int, bytes]
_encoder = encoder()
_error_decoder = decoder(RemoteError)


class RpcDisconnected(Exception):
    """The other end is gone, or this end was closed."""


class NetworkLine(NamedTuple):
    """Where a process listens for one caller on another machine, and what it may be asked."""

    dialect: Dialect
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Method:
    """A method of the dialect. place: its index, in an order known to both ends."""

    place: int
    name: str
    args: Decoder
    answer: Decoder


def _methods(dialect: Dialect) -> list[_Method]:
    return [
        _Method(place=place, name=name, args=decoder(args_type(types)), answer=decoder(types.answer))
        for place, (name, types) in enumerate(dialect.calls.items())
    ]


class RpcServer:
    """The called end: runs `answer(method, *args)` for each call, each in a task, begun in their order."""

    def __init__(self, answer: Callable[..., Awaitable[object]], dialect: Dialect) -> None:
        self._ask = answer
        self._methods = _methods(dialect)
        self._errors = dialect.errors
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def listen(self, path: str) -> None:
        """Listen at a path, at which one caller may connect. Raises OSError."""
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def listen_to_network(self, host: str, key: bytes) -> int:
        """Listen at a port of this address, at which one caller that has the key may connect. Returns the port. Raises
        OSError.
        """

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await _prove_key(reader, writer, key, calls=False)
            except (OSError, asyncio.IncompleteReadError):
                writer.close()
            else:
                await self._serve(reader, writer)

        self._server = await asyncio.start_server(serve, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._server is not None
        self._server.close()
        while (frame := await _read_frame(reader)) is not None:
            call = asyncio.create_task(self._answer(*frame, writer))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        writer.close()

    async def _answer(self, number: int, place: int, asked: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            method = self._methods[place]
            args = msgspec.structs.astuple(method.args.decode(asked))
            answer = _frame(number, ANSWERED, _encoder.encode(await self._ask(method.name, *args)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # any error: an unanswered caller would wait forever
            answer = _frame(number, FAILED, _encoder.encode(remote_error(error, self._errors)))
        writer.writelines(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A call that waits for its answer."""

    method: _Method
    answer: asyncio.Future[object]


class RpcClient:
    """The calling end; `name` is for tracebacks. Answers may come in any order."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, dialect: Dialect) -> None:
        self._name = name
        self._writer = writer
        self._methods: Mapping[str, _Method] = {method.name: method for method in _methods(dialect)}
        self._errors = dialect.errors
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._broken = False
        self._reading = asyncio.create_task(self._read_answers(reader))

    @classmethod
    async def connect(cls, path: str, name: str, dialect: Dialect) -> RpcClient:
        """Connect. Raises OSError."""
        reader, writer = await asyncio.open_unix_connection(path)
        return cls(name, reader, writer, dialect)

    @classmethod
    async def connect_over_network(cls, host: str, port: int, key: bytes, name: str, dialect: Dialect) -> RpcClient:
        """Connect to another machine. Raises OSError, also if nobody answers there, or somebody without the key."""
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, port)
        try:
            await _prove_key(reader, writer, key, calls=True)
        except asyncio.IncompleteReadError as error:
            writer.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the other end closed the connection", host) from error
        except BaseException:
            writer.close()
            raise
        return cls(name, reader, writer, dialect)

    def carries(self, method: str) -> bool:
        return method in self._methods

    async def call(self, method: str, *args: object) -> object:
        """Call a method. Raises its error, or RpcDisconnected; TypeError for arguments that can't be sent."""
        if self._broken:
            raise RpcDisconnected
        asked = self._methods[method]
        frame = _frame(number := next(self._numbers), asked.place, _encoder.encode(args))
        waiting = self._waiting[number] = _Waiting(method=asked, answer=asyncio.get_running_loop().create_future())
        try:
            self._writer.writelines(frame)
            return await waiting.answer
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Close. Waiting calls raise RpcDisconnected."""
        self._reading.cancel()
        self._break()

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        while (frame := await _read_frame(reader)) is not None:
            number, what, body = frame
            waiting = self._waiting.get(number)
            if waiting is None or waiting.answer.done():
                continue  # cancelled while the answer was on its way
            try:
                if what == FAILED:
                    waiting.answer.set_exception(rebuild_error(_error_decoder.decode(body), self._errors, self._name))
                else:
                    waiting.answer.set_result(waiting.method.answer.decode(body))
            except Exception as unknown:  # not of the method's return type
                waiting.answer.set_exception(unknown)
        self._break()

    def _break(self) -> None:
        self._broken = True
        self._writer.close()
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(RpcDisconnected())


@contextmanager
def socket_path() -> Iterator[str]:
    """Context: a path for a socket, in a folder that only this user can read. Its end removes both, whoever died in
    between: then no other process can connect, and nothing stays on the disk. Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix="grmpipe-line-") as folder:
        path = f"{folder}/line"
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, "the path of the temporary folder is too long for a socket", folder)
        yield path


async def _prove_key(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, calls: bool) -> None:
    """Show the other end that this one has the key, and see that it has: the key itself never travels here. The caller
    proves first. Raises OSError or IncompleteReadError.
    """
    _watch_connection(writer)
    own = secrets.token_bytes(NONCE_BYTES)

    def make_proof(nonce: bytes, *, calls: bool) -> bytes:
        return hmac.digest(key, (b"caller " if calls else b"called ") + nonce, "sha256")

    async with asyncio.timeout(HANDSHAKE_S):
        writer.write(own)
        theirs = await reader.readexactly(NONCE_BYTES)
        if calls:
            writer.write(make_proof(theirs, calls=True))
        proof = await reader.readexactly(PROOF_BYTES)
        if not hmac.compare_digest(proof, make_proof(own, calls=not calls)):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the other end has another key")
        if not calls:
            writer.write(make_proof(theirs, calls=False))


def _watch_connection(writer: asyncio.StreamWriter) -> None:
    """Let the system notice that the other machine is gone."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if (number := getattr(socket, option, None)) is not None:  # Linux has all
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


async def _read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """One frame; None at the end, if the other side closed or died."""
    try:
        number, what, length = HEADER.unpack(await reader.readexactly(HEADER.size))
        return number, what, await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _frame(number: int, what: int, body: bytes) -> tuple[bytes, bytes]:
    return HEADER.pack(number, what, len(body)), body
