"""An MCP server for tests: a process of its own, over stdin and stdout, or over HTTP at a port."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: float, b: float) -> str:
    """Divide a by b."""
    if b == 0:
        raise ToolError("b is zero")
    return str(a / b)


@server.tool()
def session(ctx: Context) -> str:
    """The session that this call belongs to, and a header."""
    headers = ctx.request_context.request.headers
    return f"{headers.get('mcp-session-id')} {headers.get('x-key')}"


@server.tool()
def die() -> None:
    """End this process at once."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
