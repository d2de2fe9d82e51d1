"""A line between two processes, its two ends on one loop."""

from __future__ import annotations

import asyncio
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from models.types import EngineRefused
from scheduler.processes.unix_rpc import Line, LineBroken, LineEnd


class Unspeakable(Exception):
    """Pickles, but can't be made anew from its message alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class BrokenOff(BaseException):
    """No Exception, as what torch's checkpoints raise."""


class Target:
    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def add(self, one: int, two: int) -> int:
        return one + two

    async def wait(self) -> str:
        await self.gate.wait()
        return "opened"

    async def open(self) -> None:
        self.gate.set()

    async def refuse(self) -> None:
        raise EngineRefused("too long")

    async def stumble(self) -> None:
        raise Unspeakable(1, 2)

    async def break_off(self) -> None:
        raise BrokenOff("rank 0: the disk is full")


def end_of(target: object) -> LineEnd:
    return LineEnd(lambda method, *args: getattr(target, method)(*args))


@asynccontextmanager
async def a_line() -> AsyncIterator[tuple[Line, Target]]:
    target = Target()
    line = await Line.connect(await end_of(target).listen(), "policy-0")
    yield line, target
    line.close()


def test_calls_are_answered_in_any_order() -> None:
    async def run() -> None:
        async with a_line() as (line, _):
            waiting = asyncio.create_task(line.call("wait"))
            assert await line.call("add", 2, 3) == 5
            assert not waiting.done()
            await line.call("open")
            assert await waiting == "opened"

    asyncio.run(run())


def test_what_is_no_exception_is_answered_as_one() -> None:
    """Unanswered, its caller would wait for ever; as itself, it would pass every `except Exception`."""

    async def run() -> None:
        async with a_line() as (line, _), asyncio.timeout(5):
            with pytest.raises(RuntimeError, match="BrokenOff: rank 0: the disk is full"):
                await line.call("break_off")
            assert await line.call("add", 2, 3) == 5

    asyncio.run(run())


def test_an_answer_of_any_size_arrives_whole() -> None:
    class Large:
        async def twice(self, data: bytes) -> bytes:
            return data + data

    async def run() -> None:
        line = await Line.connect(await end_of(Large()).listen(), "policy-0")
        data = bytes(range(256)) * 20_000
        assert await line.call("twice", data) == data + data
        line.close()

    asyncio.run(run())


def test_errors_arrive_as_themselves_or_as_their_traceback() -> None:
    async def run() -> None:
        async with a_line() as (line, _):
            with pytest.raises(EngineRefused, match="too long") as caught:
                await line.call("refuse")
            assert "in policy-0" in str(caught.value.__cause__) and "in refuse" in str(caught.value.__cause__)
            with pytest.raises(RuntimeError, match="Unspeakable: 1 and 2"):
                await line.call("stumble")
            with pytest.raises(AttributeError, match="no_such_thing"):
                await line.call("no_such_thing")
            assert await line.call("add", 1, 1) == 2

    asyncio.run(run())


class Strange:
    """Can be pickled, but never made anew."""

    def __reduce__(self) -> tuple[object, ...]:
        return (vanish, ())


def vanish() -> None:
    raise ImportError("not known here")


def test_what_only_one_process_knows_fails_its_call_alone() -> None:
    class Stranger:
        async def bring(self) -> Strange:
            return Strange()

        async def take(self, what: object) -> None: ...

        async def add(self, one: int, two: int) -> int:
            return one + two

    async def run() -> None:
        line = await Line.connect(await end_of(Stranger()).listen(), "policy-0")
        with pytest.raises(ImportError, match="not known here"):
            await line.call("bring")
        with pytest.raises(ImportError, match="not known here"):
            await line.call("take", Strange())
        assert await line.call("add", 1, 2) == 3
        line.close()

    asyncio.run(run())


def test_who_waits_hears_of_the_end() -> None:
    async def run() -> None:
        async with a_line() as (line, _):
            waiting = asyncio.create_task(line.call("wait"))
            await line.call("add", 1, 1)
            line.close()
            with pytest.raises(LineBroken):
                await waiting
            with pytest.raises(LineBroken):
                await line.call("add", 1, 1)

    asyncio.run(run())


def test_the_death_of_the_other_end_is_heard() -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(8)
            writer.write(b"\0\0")  # dies within an answer
            writer.transport.abort()

        path = Path(tempfile.mkdtemp()) / "line"
        server = await asyncio.start_unix_server(serve, path)
        line = await Line.connect(str(path), "policy-0")
        with pytest.raises(LineBroken):
            await line.call("add", 1, 1)
        server.close()

    asyncio.run(run())


def test_a_call_that_was_given_up_disturbs_no_other() -> None:
    async def run() -> None:
        async with a_line() as (line, _):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await line.call("wait")
            await line.call("open")
            assert await line.call("add", 2, 2) == 4

    asyncio.run(run())


def test_where_no_socket_can_be_had_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OSError, match="too long"):
        asyncio.run(end_of(Target()).listen())
    assert not [*deep.iterdir()]


def test_one_caller_gets_in_and_nothing_stays() -> None:
    async def run() -> None:
        path = Path(await end_of(Target()).listen())
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        line = await Line.connect(str(path), "policy-0")
        assert await line.call("add", 1, 2) == 3
        assert not path.parent.exists()
        with pytest.raises(FileNotFoundError):
            await Line.connect(str(path), "policy-0")
        line.close()

    asyncio.run(run())
