"""Calls between two processes of one machine, over a Unix socket that nobody else can reach. Knows no Ray.

A call of Ray's passes several threads at either end, and engines and learners are called tens of times a step: they
are called this way where it can be had.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import struct
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

HEADER = struct.Struct("!QQ")  # a frame is the number of its call, the length of a pickle, and the pickle


class LineBroken(Exception):
    """The other end is gone, or this one was closed."""


class RemoteTraceback(Exception):
    """Where in the other process an error was raised; hangs below the error itself."""


class LineEnd:
    """The end that is called: `answer(method, *args)` for each call, in a task of its own, begun in their order."""

    def __init__(self, answer: Callable[..., Awaitable[object]]) -> None:
        self._ask = answer
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def listen(self) -> str:
        """Returns the path at which one caller may connect. Its folder is this user's alone: pickles are trusted."""
        path = Path(tempfile.mkdtemp(prefix="grmpipe-line-")) / "line"
        try:
            self._server = await asyncio.start_unix_server(self._serve, path)
        except OSError:
            _remove(path)
            raise
        return str(path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._server is not None
        self._server.close()
        while (frame := await _read_frame(reader)) is not None:
            call = asyncio.create_task(self._answer(*frame, writer))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        writer.close()

    async def _answer(self, number: int, asked: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            method, args = pickle.loads(asked)
            answer = _frame_of(number, (await self._ask(method, *args), None, ""))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # whatever it was: unanswered, the caller would wait for ever
            trace = "".join(traceback.format_exception(error))
            answer = _frame_of(number, (None, error if _can_travel(error) else RuntimeError(trace), trace))
        writer.write(answer)


class Line:
    """The end that calls `name`, as tracebacks say. Answers come in any order."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._name = name
        self._writer = writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._broken = False
        self._reading = asyncio.create_task(self._read_answers(reader))

    @classmethod
    async def connect(cls, path: str, name: str) -> Line:
        """The path is gone then: nobody else gets in, and nothing stays on the disk."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        finally:
            _remove(Path(path))
        return cls(name, reader, writer)

    async def call(self, method: str, *args: object) -> object:
        """Raises what the method raised, or LineBroken."""
        if self._broken:
            raise LineBroken
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(_frame_of(number, (method, args)))
            return await answer
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Whoever waits for an answer hears LineBroken."""
        self._reading.cancel()
        self._break()

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        while (frame := await _read_frame(reader)) is not None:
            number, told = frame
            waiting = self._waiting.get(number)
            if waiting is None or waiting.done():
                continue  # given up while the answer travelled
            try:
                answer, error, trace = pickle.loads(told)
            except Exception as unknown:  # something that only the other process can import
                waiting.set_exception(unknown)
                continue
            if error is None:
                waiting.set_result(answer)
            else:
                error.__cause__ = RemoteTraceback(f"in {self._name}:\n{trace}")
                waiting.set_exception(error)
        self._break()

    def _break(self) -> None:
        self._broken = True
        self._writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LineBroken())


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.rmdir()


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes] | None:
    """The call's number and a pickle. None at the end, whether the other side closed or died."""
    try:
        number, length = HEADER.unpack(await reader.readexactly(HEADER.size))
        return number, await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _frame_of(number: int, what: object) -> bytes:
    body = pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(number, len(body)) + body


def _can_travel(error: BaseException) -> bool:
    """Some can't be pickled, or not be made anew; and what is no Exception would end the caller's process."""
    if not isinstance(error, Exception):
        return False
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
