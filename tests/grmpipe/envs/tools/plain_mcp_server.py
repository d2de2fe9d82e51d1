"""An MCP server of the standard library alone, which starts in milliseconds: the protocol by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NO_METHOD = {"code": -32601, "message": "no such method"}
NOTHING = {"type": "object", "properties": {}}


def answer(method: str, params: dict) -> dict:
    if method == "initialize":
        about = {"name": "plain", "version": "1"}
        version = params["protocolVersion"]
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}}
    if method == "tools/list":
        return {
            "result": {
                "tools": [{"name": name, "inputSchema": NOTHING} for name in ("add", "process", "refuse", "die")]
            }
        }
    if method == "tools/call":
        if params["name"] == "die":
            os._exit(1)
        if params["name"] == "refuse":
            return {"error": {"code": -32000, "message": "the database says no"}}
        return {"result": {"content": [{"type": "text", "text": str(os.getpid())}]}}
    return {"error": NO_METHOD}


if __name__ == "__main__":
    with Path(os.environ["STARTED"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            said = {"jsonrpc": "2.0", "id": asked["id"], **answer(asked["method"], asked.get("params", {}))}
            print(json.dumps(said), flush=True)
