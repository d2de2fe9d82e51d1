"""Tools of servers that speak the Model Context Protocol: over stdin and stdout, or HTTP.

An answer that says no (MCP's is-error flag, an error of JSON-RPC) is the policy's fault; a server that can't be
reached, or dies, is the environment's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO, TypeVar

from grmpipe.config.env import EnvConfig, McpServerConfig
from grmpipe.config.keys.secrets import mask
from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.envs.process_group import wrap_command
from grmpipe.envs.tools.function_tools import load_tools
from grmpipe.models.engines.network import find_network_path
from grmpipe.models.types import ToolCall, ToolSpec
from grmpipe.types import EnvCause

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from mcp import Client
    from mcp.client.session import MessageHandlerFnT
    from mcp.types import CallToolResult

log = logging.getLogger(__name__)

T = TypeVar("T")
SHOWN_ERROR_CHARS = 500
CONNECT_S, READ_S = 30.0, 300.0  # the library's own; env.step_s and env.boot_s are shorter
ANSWER_S = 5.0  # for a server to show that it still answers, after an error
END_S = 10.0  # for a server to end after its connection; mcp kills it long before
INSTALL = "mcp: servers of tools need the package mcp; type: pip install 'grmpipe[mcp]'"


def check_mcp_installed() -> None:
    """Raises ValueError if there is no mcp."""
    if importlib.util.find_spec("mcp") is None:
        raise ValueError(INSTALL)


async def check_servers(config: EnvConfig) -> None:
    """Start each server once. Raises ValueError that begins with the key, for one that doesn't start within boot_s, and
    for a tool with the name of another one.
    """
    owners = {tool.spec.name: "functions" for tool in (load_tools(config.functions) if config.functions else ())}
    servers = McpServers(config.mcp_servers)
    asking = (list_tools(servers, name, config.boot_s) for name in config.mcp)
    found = await asyncio.gather(*asking, return_exceptions=True)  # the others end too, before one is raised
    await servers.close()
    for name, tools in zip(config.mcp, found, strict=True):
        if isinstance(tools, BaseException):
            raise tools
        for tool in tools:
            if (other := owners.setdefault(tool, f"mcp.{name}")) != f"mcp.{name}":
                raise ValueError(
                    f"mcp.{name}: its tool {tool} is also one of env.{other}; rename one, or leave one out"
                )


async def list_tools(servers: McpServers, name: str, limit_s: float) -> list[str]:
    """The names of a server's tools. Raises ValueError."""
    try:
        async with asyncio.timeout(limit_s):
            return await servers.list_names(name)
    except EnvFault as fault:
        raise ValueError(f"mcp.{name}: {fault}") from fault
    except TimeoutError:
        text = f"mcp.{name}: it lists no tools within env.boot_s = {limit_s:g} s"
        if wrote := servers.malformed.get(name):
            text += f"; it wrote what is no message of MCP (JSON-RPC 2.0, one message per line): {wrote}"
        raise ValueError(text) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """A tool of a server. Its arguments are checked there."""

    spec: ToolSpec
    connection: Connection

    async def call(self, call: ToolCall) -> str:
        """The result as text. Raises PolicyFault if the tool says no, EnvFault if the server fails."""
        return await self.connection.call_tool(call)


class McpServers:
    """The servers of a run, by name. Those that are shared are connected once, others once per episode: a program or a
    session of its own, so that no episode reads what another one left.

    malformed: name -> the last that a server wrote that is no message of MCP, shortened, without what it was given.
    """

    def __init__(self, configs: Mapping[str, McpServerConfig]) -> None:
        self._configs = dict(configs)
        self.malformed: dict[str, str] = {}
        self._https: dict[str, AsyncClient] = {}  # one for all sessions at a URL: it takes long to make
        self._specs: dict[str, tuple[ToolSpec, ...]] = {}  # read once per run
        self._shared: dict[str, Connection] = {}
        self._connecting = asyncio.Lock()

    async def open(self) -> OpenServers:
        """Connections for one episode. Raises EnvFault (boot) if a server doesn't start."""
        connections: dict[str, Connection] = {}
        own: list[Connection] = []
        try:
            for name, config in self._configs.items():
                if config.shared:
                    connections[name] = await self._shared_connection(name)
                else:
                    own.append(await self._connection(name))
                    connections[name] = own[-1]
            tools = [tool for name, one in connections.items() for tool in await self._tools_of(name, one)]
        except BaseException:
            await asyncio.gather(*(one.close() for one in own))
            raise
        return OpenServers(tools=tuple(tools), own=tuple(own))

    async def list_names(self, name: str) -> list[str]:
        """The tools of one server, which is started for that. Raises EnvFault."""
        connection = await self._connection(name)
        try:
            return [tool.spec.name for tool in await self._tools_of(name, connection)]
        finally:
            await connection.close()

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._shared.values()))
        self._shared.clear()
        await asyncio.gather(*(http.aclose() for http in self._https.values()))
        self._https.clear()

    async def _connection(self, name: str) -> Connection:
        config = self._configs[name]
        if config.url and name not in self._https:
            self._https[name] = http_client(config)

        def note(wrote: str) -> None:
            if name not in self.malformed:
                log.warning("the MCP server %s wrote what is no message of MCP: %s", name, wrote)
            self.malformed[name] = wrote

        return await Connection.open(name, config, self._https.get(name), note)

    async def _shared_connection(self, name: str) -> Connection:
        """The run's connection, made again if it broke."""
        async with self._connecting:
            if (before := self._shared.get(name)) is not None and before.is_alive:
                return before
            if before is not None:
                await before.close()
            self._shared[name] = await self._connection(name)
            return self._shared[name]

    async def _tools_of(self, name: str, connection: Connection) -> list[McpTool]:
        if name not in self._specs:
            self._specs[name] = select_allowed(await connection.list_tools(), self._configs[name].tools)
        return [McpTool(spec=spec, connection=connection) for spec in self._specs[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenServers:
    """The servers of one episode. own: connections that end with it."""

    tools: tuple[McpTool, ...]
    own: tuple[Connection, ...]

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self.own))


class Connection:
    """A connection to a server, in a task of its own: the library wants it opened and closed by the same one."""

    def __init__(
        self, name: str, config: McpServerConfig, http: AsyncClient | None, on_malformed: Callable[[str], None]
    ) -> None:
        self._name = name
        self._on_malformed = on_malformed
        self._config = config
        self._http = http
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._broken = False
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed at the end
        self._task = asyncio.create_task(self._run())

    @staticmethod
    async def open(
        name: str, config: McpServerConfig, http: AsyncClient | None, on_malformed: Callable[[str], None]
    ) -> Connection:
        """http: sends the requests to a URL. on_malformed: gets what came and is no message of MCP."""
        connection = Connection(name, config, http, on_malformed)
        try:
            await asyncio.shield(connection._ready)
        except asyncio.CancelledError:
            await connection.close()
            raise
        except Exception as error:
            said = connection.read_stderr()
            await connection.close()
            by = find_network_path(config.url).by if config.url else ""
            text = f"the MCP server {name} ({config}){by} doesn't start: {connection.explain_error(error)}"
            if config.url and not config.shared:
                text += "; one that keeps no sessions needs shared: true"
            raise EnvFault(f"{text}; {said}" if said else text, "boot") from error
        return connection

    @property
    def is_alive(self) -> bool:
        return not self._broken and not self._task.done()

    def read_stderr(self) -> str:
        """The last of what the program wrote to stderr, without what it was given."""
        self._errors.seek(0)
        return mask(self._errors.read(), self._config.secrets)[-SHOWN_ERROR_CHARS:].strip()

    def explain_error(self, error: BaseException) -> str:
        return mask(find_first_error(error), self._config.secrets)

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        """All tools of the server."""
        client, specs, cursor = self._ready.result(), [], None
        while True:
            page = await self._asked(client.list_tools(cursor=cursor))
            specs += [
                ToolSpec(name=tool.name, description=tool.description or "", parameters=dict(tool.input_schema))
                for tool in page.tools
            ]
            if (cursor := page.next_cursor) is None:
                return tuple(specs)

    async def call_tool(self, call: ToolCall) -> str:
        result = await self._asked(self._ready.result().call_tool(call.name, dict(call.arguments)))
        text = to_text(result)
        if result.is_error:
            raise PolicyFault(text)
        return text

    async def close(self) -> None:
        """End the connection, and the program behind it."""
        self._end.set()
        if not self._ready.done():
            self._task.cancel()  # it still starts
        _, left = await asyncio.wait({self._task}, timeout=END_S)
        self._errors.close()
        for task in left:
            log.warning("the MCP server %s didn't end within %g s", self._name, END_S)
            task.cancel()

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(
                    make_client(self._config, self._http, self._errors, self._read)
                )
                self._ready.set_result(client)
                await self._end.wait()
        except Exception as error:  # the library's transports raise what their own libraries do
            self._broken = True
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                log.info("the connection to the MCP server %s ended: %s", self._name, self.explain_error(error))

    async def _read(self, message: object) -> None:
        """Notes an error of the transport: the library hands over what it couldn't read among the messages."""
        if isinstance(message, Exception):
            self._on_malformed(mask(unread(message), self._config.secrets)[:SHOWN_ERROR_CHARS])

    async def _asked(self, asking: Coroutine[object, object, T]) -> T:
        """The answer. Raises PolicyFault if it is an error, EnvFault if the server fails, or the way to it."""
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        request = asyncio.ensure_future(asking)
        try:
            await asyncio.wait({request, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return request.result()
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise PolicyFault(mask(str(error), self._config.secrets), "arguments") from error
            if await self._still_answers():
                raise PolicyFault(mask(str(error), self._config.secrets)) from error
            raise EnvFault(f"the MCP server {self._name} failed: {self.explain_error(error)}", "died") from error
        except Exception as error:
            cause: EnvCause = "protocol" if await self._still_answers() else "unreachable"
            raise EnvFault(f"the MCP server {self._name}: {self.explain_error(error)}", cause) from error
        finally:
            request.cancel()
        raise EnvFault(f"the connection to the MCP server {self._name} ended", "died")

    async def _still_answers(self) -> bool:
        """Whether an error was the answer to one request. Otherwise the connection is broken: the library gives its
        transport's errors the same type.
        """
        asking = asyncio.ensure_future(self._ready.result().list_tools())
        done, _ = await asyncio.wait({asking, self._task}, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        answers = asking in done and asking.exception() is None
        self._broken |= not answers
        asking.cancel()
        return answers


def make_client(
    config: McpServerConfig,
    http: AsyncClient | None,
    errors: TextIO,
    on_message: MessageHandlerFnT,
) -> Client:
    """A client, still without a connection. errors: the file for what a program writes to stderr.

    A session of its own at a URL needs the protocol's versions up to 2025: later ones have none.
    """
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if config.url:
        mode = "auto" if config.shared else "legacy"
        transport = streamable_http_client(config.url, http_client=http)
        return Client(transport, mode=mode, cache=None, message_handler=on_message)
    program, *arguments = wrap_command(config.command)
    parameters = StdioServerParameters(command=program, args=arguments, env=dict(config.env))
    return Client(stdio_client(parameters, errlog=errors), cache=None, message_handler=on_message)


def http_client(config: McpServerConfig) -> AsyncClient:
    """The client of all sessions at a URL. Raises EnvFault (boot) for a proxy or certificates that can't be used."""
    import httpx2  # the library's own, whose client it takes

    try:
        path = find_network_path(config.url)
    except ValueError as error:
        raise EnvFault(str(error), "boot") from error
    return httpx2.AsyncClient(
        headers=dict(config.headers),
        timeout=httpx2.Timeout(CONNECT_S, read=READ_S),
        limits=httpx2.Limits(max_connections=None),  # for every session
        trust_env=False,
        proxy=path.proxy,
        verify=path.tls or True,
    )


def select_allowed(specs: Sequence[ToolSpec], names: Sequence[str]) -> tuple[ToolSpec, ...]:
    """The tools of these names; all if there are no names. Raises EnvFault (boot) for a name without a tool."""
    there = {spec.name: spec for spec in specs}
    if unknown := [name for name in names if name not in there]:
        raise EnvFault(f"tools: the server has no {', '.join(unknown)}; it has: {', '.join(there)}", "boot")
    return tuple(there[name] for name in names or there)


def to_text(result: CallToolResult) -> str:
    """The result's texts. What isn't text is only named."""
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)


def unread(error: Exception) -> str:
    """What the library couldn't read as a message; its error if that doesn't hold it."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return find_first_error(error)
    inputs = (found if isinstance(found := one["input"], str) else json.dumps(found) for one in error.errors())
    return max(inputs, key=len)


def find_first_error(error: BaseException) -> str:
    """The first error of a group of them, as task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
