"""Calls between two processes, with both ends on one loop."""

from __future__ import annotations

import asyncio
import pickle
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from grmpipe.models.types import EngineRefused
from grmpipe.scheduler.processes import rpc
from grmpipe.scheduler.processes.rpc import FAILED, HEADER, RpcClient, RpcDisconnected, RpcServer, socket_path
from grmpipe.scheduler.processes.wire_types import Dialect


class Unspeakable(Exception):
    """Can be pickled, but not made again from its message alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class BrokenOff(BaseException):
    """No Exception, like the errors of torch's checkpoints."""


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


def end_of(target: object) -> RpcServer:
    return RpcServer(lambda method, *args: getattr(target, method)(*args), Dialect.of(type(target)))


async def line_to(target: object) -> RpcClient:
    with socket_path() as path:
        await end_of(target).listen(path)
        return await RpcClient.connect(path, "policy-0", Dialect.of(type(target)))


@asynccontextmanager
async def a_line() -> AsyncIterator[tuple[RpcClient, Target]]:
    target = Target()
    line = await line_to(target)
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


def test_a_base_exception_is_answered_as_a_runtime_error() -> None:
    """Without an answer its caller would wait forever; as itself it would pass every `except Exception`."""

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
        line = await line_to(Large())
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
            assert not line.carries("no_such_thing")
            assert await line.call("add", 1, 1) == 2

    asyncio.run(run())


def test_a_result_of_another_type_fails_its_call_alone() -> None:
    class Careless:
        async def bring(self) -> int:
            return cast(int, "three")

        async def bring_a_stranger(self) -> int:
            return cast(int, Target())

        async def add(self, one: int, two: int) -> int:
            return one + two

    async def run() -> None:
        line = await line_to(Careless())
        with pytest.raises(ValueError, match="Expected `int`, got `str`"):
            await line.call("bring")
        with pytest.raises(TypeError, match="Target doesn't cross"):
            await line.call("bring_a_stranger")
        with pytest.raises(ValueError, match="Expected `int`, got `str`"):
            await line.call("add", 1, "two")
        with pytest.raises(TypeError, match="Target doesn't cross"):
            await line.call("add", 1, Target())
        assert await line.call("add", 1, 2) == 3
        line.close()

    asyncio.run(run())


def test_waiting_calls_fail_when_the_process_ends() -> None:
    async def run() -> None:
        async with a_line() as (line, _):
            waiting = asyncio.create_task(line.call("wait"))
            await line.call("add", 1, 1)
            line.close()
            with pytest.raises(RpcDisconnected):
                await waiting
            with pytest.raises(RpcDisconnected):
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
        line = await RpcClient.connect(str(path), "policy-0", Dialect.of(Target))
        with pytest.raises(RpcDisconnected):
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
    with pytest.raises(OSError, match="too long"), socket_path():
        pass
    assert not [*deep.iterdir()]


def test_one_caller_gets_in_and_nothing_stays() -> None:
    async def run() -> None:
        with socket_path() as path:
            await end_of(Target()).listen(path)
            assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
            line = await RpcClient.connect(path, "policy-0", Dialect.of(Target))
            assert await line.call("add", 1, 2) == 3
            with pytest.raises((ConnectionRefusedError, FileNotFoundError)):  # Python 3.13 removes the socket
                await RpcClient.connect(path, "policy-0", Dialect.of(Target))
        assert not Path(path).parent.exists()
        assert await line.call("add", 1, 2) == 3
        line.close()

    asyncio.run(run())


def test_over_the_network_only_a_caller_with_the_key_gets_in_and_only_one() -> None:
    async def run() -> None:
        server, key = end_of(Target()), b"k" * 32
        port = await server.listen_to_network("127.0.0.1", key)

        async def connect(key: bytes) -> RpcClient:
            return await RpcClient.connect_over_network("127.0.0.1", port, key, "policy-0", Dialect.of(Target))

        with pytest.raises(ConnectionRefusedError, match="closed the connection"):
            await connect(b"another")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        nonce = await reader.readexactly(32)
        writer.write(nonce + nonce)  # what the other end says, said back
        assert await reader.read() == b""
        writer.close()
        line = await connect(key)
        assert await line.call("add", 1, 2) == 3
        with pytest.raises(OSError):
            await connect(key)
        line.close()
        with pytest.raises(RpcDisconnected):
            await line.call("add", 1, 2)

    asyncio.run(run())


def test_a_caller_notices_that_the_other_end_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else who listens at that port by then."""
    monkeypatch.setattr(rpc, "HANDSHAKE_S", 0.5)

    async def run() -> None:
        async def claim(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(32))
            writer.write(await reader.readexactly(32))  # the caller's own proof

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        for answer, told in ((claim, "another key"), (say_nothing, None)):
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(OSError, match=told):
                await RpcClient.connect_over_network("127.0.0.1", port, b"key", "policy-0", Dialect.of(Target))
            server.close()

    asyncio.run(run())


ran: list[str] = []


class Trap:
    """Runs something when unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (spring, ())


def spring() -> None:
    ran.append("it was unpickled")


def test_a_pickle_on_the_socket_runs_nothing_and_is_refused() -> None:
    async def run() -> None:
        with socket_path() as path:
            await end_of(Target()).listen(path)
            reader, writer = await asyncio.open_unix_connection(path)
        body = pickle.dumps(((), Trap()))
        pickle.loads(body)
        assert ran == ["it was unpickled"], "it would run"
        writer.write(HEADER.pack(7, 0, len(body)) + body)
        number, what, length = HEADER.unpack(await reader.readexactly(HEADER.size))
        assert (number, what) == (7, FAILED)
        await reader.readexactly(length)
        assert ran == ["it was unpickled"], "it ran again at the end that is called"
        writer.close()

    asyncio.run(run())
