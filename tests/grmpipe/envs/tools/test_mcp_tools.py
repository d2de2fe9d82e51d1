"""Tools of real MCP servers, over stdin and stdout and over HTTP: results, faults, and that no process stays."""

from __future__ import annotations

import asyncio
import logging
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.config.env import EnvConfig, McpServerConfig
from grmpipe.envs.env import Action, EnvFault, Episode, Observation
from grmpipe.envs.tools.mcp_tools import McpServers, check_servers
from grmpipe.envs.tools.tool_env import ToolEnv
from grmpipe.models.types import Message, ToolCall
from grmpipe.observe.logs import setup_logging
from grmpipe.types import Prompt

CALCULATOR = str(Path(__file__).with_name("mcp_calculator.py"))  # of the mcp package; seconds to start
PLAIN = str(Path(__file__).with_name("plain_mcp_server.py"))
EPISODE = Episode(prompt=Prompt(prompt_id="p", messages=(Message(role="user", content="?"),)))


def stdio(tmp_path: Path, *, shared: bool = False) -> McpServerConfig:
    return McpServerConfig(
        command=[sys.executable, "-S", PLAIN], env={"STARTED": str(tmp_path / "started")}, shared=shared
    )


def called(*calls: tuple[str, dict]) -> Action:
    return Action(
        text="", tool_calls=tuple(ToolCall(name=name, arguments=arguments, call_id="c") for name, arguments in calls)
    )


def texts(observation: Observation) -> list[str]:
    return [message.content for message in observation.messages]


def run(servers: dict[str, McpServerConfig], talk: Callable[..., Awaitable[None]], functions: str = "") -> None:
    """Run `talk(open_env)`; then close the servers, and check that nothing is left."""

    async def play() -> None:
        shared = McpServers(servers)
        envs = []

        async def open_env() -> ToolEnv:
            envs.append(env := ToolEnv(functions, shared))
            await env.open(EPISODE)
            return env

        try:
            await talk(open_env)
        finally:
            for env in envs:
                await env.close()
            await shared.close()
        assert len(asyncio.all_tasks()) == 1, "a connection is left"

    asyncio.run(play())


def started(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "started").read_text().split()]


def test_the_tools_of_a_program_are_called_and_their_errors_are_the_policys() -> None:
    async def talk(open_env: Callable) -> None:
        env = await open_env()
        observation = await env.step(
            called(
                ("add", {"a": 1, "b": 2}),
                ("divide", {"a": 1, "b": 0}),
                ("add", {"a": "one"}),
                ("subtract", {}),
            )
        )
        result, no, wrong, unknown = texts(observation)
        assert result == "3" and no.endswith("b is zero") and "add" in wrong
        assert unknown.startswith("there is no tool subtract; known: add, divide, session, die")
        assert observation.faults[-1] == "unknown_tool" and len(observation.faults) == 3
        assert observation.messages[0] == Message(role="tool", content="3", name="add", tool_call_id="c")

    run({"calc": McpServerConfig(command=[sys.executable, CALCULATOR])}, talk)


def test_each_episode_has_its_own_program_unless_it_is_shared(tmp_path: Path) -> None:
    async def talk(open_env: Callable) -> None:
        first, second = await asyncio.gather(open_env(), open_env())
        ids = [texts(await env.step(called(("process", {}))))[0] for env in (first, second)]
        assert (ids[0] == ids[1]) == shared

    for shared in (False, True):
        (tmp_path / "started").unlink(missing_ok=True)
        run({"calc": stdio(tmp_path, shared=shared)}, talk)
        assert len(started(tmp_path)) == (1 if shared else 2)
        assert not any(Path(f"/proc/{pid}").exists() for pid in started(tmp_path)), "a program is left"


def test_a_server_that_dies_is_a_fault_and_the_next_episode_gets_a_new_one(tmp_path: Path) -> None:
    async def talk(open_env: Callable) -> None:
        env = await open_env()
        with pytest.raises(EnvFault) as fault:
            await env.step(called(("die", {})))
        assert fault.value.cause == "died"
        assert texts(await (await open_env()).step(called(("process", {})))) == [str(started(tmp_path)[1])]

    run({"calc": stdio(tmp_path, shared=True)}, talk)
    assert len(started(tmp_path)) == 2


def test_an_error_as_an_answer_is_that_calls_result_and_leaves_the_others_their_server(tmp_path: Path) -> None:
    async def talk(open_env: Callable) -> None:
        env, other = await open_env(), await open_env()
        refused, process = await asyncio.gather(env.step(called(("refuse", {}))), other.step(called(("process", {}))))
        assert texts(refused) == ["the database says no"] and refused.faults == ("tool",)
        assert texts(process) == texts(await env.step(called(("process", {})))) == [str(started(tmp_path)[0])]

    run({"calc": stdio(tmp_path, shared=True)}, talk)
    assert len(started(tmp_path)) == 1


def test_the_policy_sees_the_tools_that_a_server_may_offer(tmp_path: Path) -> None:
    some = replace(stdio(tmp_path), tools=["process"])

    async def talk(open_env: Callable) -> None:
        observation = await (await open_env()).step(called(("die", {})))
        assert texts(observation) == ["there is no tool die; known: process"]

    run({"calc": some}, talk)
    unknown = {"command": some.command, "env": some.env, "tools": ["process", "serach"]}
    with pytest.raises(ValueError, match=r"^mcp\.calc: tools: the server has no serach; it has: add, process, refuse"):
        asyncio.run(check_servers(EnvConfig(kind="tools", mcp={"calc": unknown})))


@pytest.fixture
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    server = subprocess.Popen([sys.executable, CALCULATOR, str(port)], stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < end_s, "the server doesn't start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


def test_the_tools_of_a_url_join_the_functions(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "double_tools.py").write_text("def double(a: int) -> int:\n    return 2 * a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there: it isn't asked for this machine

    async def talk(open_env: Callable) -> None:
        env, other = await open_env(), await open_env()
        assert texts(await env.step(called(("double", {"a": 4}), ("add", {"a": 1, "b": 2})))) == ["8", "3"]
        ids = [texts(await one.step(called(("session", {}))))[0].split() for one in (env, other, env)]
        assert ids[0] == ids[2] != ids[1] and {key for _, key in ids} == {"k"}
        assert "None" not in ids[0]
        with pytest.raises(EnvFault) as fault:
            await env.step(called(("die", {})))
        assert fault.value.cause in ("died", "unreachable")
        with pytest.raises(EnvFault) as fault:
            await open_env()
        assert fault.value.cause == "boot"

    run({"calc": McpServerConfig(url=url, headers={"X-Key": "k"})}, talk, "double_tools")


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (McpServerConfig(command=["no-such-program"]), "no-such-program can't be started"),
        (McpServerConfig(command=[sys.executable, "-c", "raise SystemExit('no licence')"]), "no licence"),
        (McpServerConfig(url="http://127.0.0.1:1/mcp"), "127.0.0.1:1"),
    ],
)
def test_a_server_that_does_not_start_is_a_fault_with_its_own_words(server: McpServerConfig, said: str) -> None:
    async def talk(open_env: Callable) -> None:
        with pytest.raises(EnvFault, match=said) as fault:
            await open_env()
        assert fault.value.cause == "boot"

    run({"calc": server}, talk)


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        ("http://127.0.0.1:9", r"\(by the proxy http://127\.0\.0\.1:9 of ALL_PROXY\) doesn't start"),
        ("ftp://x", "tools.example would be asked by the proxy ftp://x of ALL_PROXY"),
    ],
)
def test_a_server_that_a_proxy_is_asked_for_names_it(monkeypatch: pytest.MonkeyPatch, proxy: str, said: str) -> None:
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)

    async def talk(open_env: Callable) -> None:
        with pytest.raises(EnvFault, match=said) as fault:
            await open_env()
        assert fault.value.cause == "boot"

    run({"calc": McpServerConfig(url="http://tools.example/mcp")}, talk)


def test_a_fault_of_a_server_shows_nothing_that_it_was_given() -> None:
    code = "import os, sys; raise SystemExit(' '.join(['refused', os.environ['TEAM'], *sys.argv[1:]]))"
    command = [sys.executable, "-S", "-c", code, "--token", "from-the-command"]

    async def talk(open_env: Callable) -> None:
        with pytest.raises(EnvFault, match="refused <redacted> --token <redacted>") as fault:
            await open_env()
        assert "from-the" not in str(fault.value)

    run({"calc": McpServerConfig(command=command, env={"TEAM": "from-the-environment"})}, talk)


def test_a_server_that_never_answers_ends_with_its_limit() -> None:
    async def talk(open_env: Callable) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await open_env()

    begun_s = time.monotonic()
    run({"calc": McpServerConfig(command=["sleep", "60"])}, talk)
    assert time.monotonic() - begun_s < 30


def test_two_tools_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_add.py").write_text("def add(a: int) -> int:\n    return a\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def talk(open_env: Callable) -> None:
        with pytest.raises(EnvFault, match="two tools are called add"):
            await open_env()

    run({"calc": stdio(tmp_path)}, talk, "own_add")


def test_servers_that_clash_or_do_not_start_are_refused_by_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_add.py").write_text("def add(a: int) -> int:\n    return a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    calc = {"command": [sys.executable, "-S", PLAIN], "env": {"STARTED": str(tmp_path / "started")}}
    own = "own_add"

    def refused(functions: str = "", boot_s: float = 60.0, **mcp: object) -> str:
        with pytest.raises(ValueError) as error:
            asyncio.run(check_servers(EnvConfig(kind="tools", functions=functions, mcp=mcp, boot_s=boot_s)))
        return str(error.value)

    assert refused(own, calc=calc).startswith("mcp.calc: its tool add is also one of env.functions; rename")
    assert refused(one=calc, two=calc).startswith("mcp.two: its tool add is also one of env.mcp.one")
    assert "can't be started" in refused(own, calc={"command": ["no-such-program"]})
    assert (
        refused(own, 0.2, calc={"command": ["sleep", "60"]}) == "mcp.calc: it lists no tools within env.boot_s = 0.2 s"
    )
    asyncio.run(check_servers(EnvConfig(kind="tools", mcp={"calc": calc})))
    assert not any(Path(f"/proc/{pid}").exists() for pid in started(tmp_path)), "a program is left"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"id": 1, "result": {}, "note": "hush-hush"}', '{"id": 1, "result": {}, "note": "<redacted>"}'),
        ('{"jsonrpc": "1.0", "id": 1, "result": {}}', '{"jsonrpc": "1.0", "id": 1, "result": {}}'),
        ("Welcome!", "Welcome!"),
    ],
)
def test_output_of_a_server_that_is_no_message_is_quoted_with_the_server(
    answer: str, said: str, tmp_path: Path, restored_logging: None
) -> None:
    setup_logging(tmp_path)
    logging.getLogger("client").warning("a client of the user's")
    echo = f"while read -r line; do echo {shlex.quote(answer)}; done"
    server = {"command": ["sh", "-c", echo], "env": {"KEY": "hush-hush"}}
    with pytest.raises(ValueError, match="^mcp.calc: it lists no tools within env.boot_s = 2 s; it wrote") as error:
        asyncio.run(check_servers(EnvConfig(kind="tools", mcp={"calc": server}, boot_s=2.0)))
    assert str(error.value).endswith(f"no message of MCP (JSON-RPC 2.0, one message per line): {said}")
    lines = (tmp_path / "run.log").read_text()
    assert "the MCP server calc wrote what is no message of MCP" in lines
    assert "hush-hush" not in lines and "Traceback" not in lines
    assert "a client of the user's" in lines, "only the library's own records are dropped"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "^command: give either a command"),
        ({"command": ["x"], "url": "http://x"}, "^command: give either"),
        ({"url": "localhost:8000"}, "^url: must begin with http"),
        (
            {"url": "http://joe:pw@x"},
            "^url: .* a password; type 'http://x', and give .* headers={Authorization",
        ),
        ({"url": "http://x", "env": {"a": "b"}}, "^env: is for a command"),
        ({"command": ["x"], "tools": "add"}, "^tools: must be a list of names"),
        ({"command": ["x"], "headers": {"a": "b"}}, "^headers: are for a url"),
        ({"command": "python server.py"}, "^command: must be a list"),
    ],
)
def test_settings_of_a_server_that_mean_nothing_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        McpServerConfig(**settings)


def test_only_an_environment_of_tools_has_servers() -> None:
    server = {"url": "http://x"}
    assert EnvConfig(kind="tools", mcp={"calc": server}).functions == ""
    with pytest.raises(ValueError, match=r"^mcp: is for env\.kind=tools"):
        EnvConfig(mcp={"calc": server})
    with pytest.raises(ValueError, match=r"^mcp\.calc: must be a block with the keys command, env.*got path$"):
        EnvConfig(kind="tools", mcp={"calc": {"path": "x"}})
    with pytest.raises(ValueError, match=r"^mcp\.calc\.url: must begin"):
        EnvConfig(kind="tools", mcp={"calc": {"url": "x"}})
    with pytest.raises(ValueError, match=r"^functions: is empty"):
        EnvConfig(kind="tools")
