"""A server of the Model Context Protocol, whose tools the policy calls. Any server will do, at a URL too.

python launch.py +experiment=quickstart env=tools rollout.max_turns=4 judge.format.truncation=middle \
    "+env.mcp.stock={command: [python, examples/mcp_server.py], shared: true}"
"""

from __future__ import annotations

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("stock")
STOCK = {"apples": 12, "pears": 7, "plums": 31}


@server.tool()
def count(fruit: str) -> int:
    """Number of pieces of a fruit in stock."""
    if fruit not in STOCK:
        raise ToolError(f"no {fruit} in stock; there are {', '.join(STOCK)}")  # the policy reads this
    return STOCK[fruit]


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    server.run()
