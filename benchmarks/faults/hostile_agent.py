"""An agent that is a program of its own, asks the policy at the gateway, and turns against the run at random: for
chaos.py. Needs the standard library only.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

KINDS = (
    "hang", "exit", "raise", "wrong type", "no JSON", "NaN", "100 MB", "daemon", "close descriptors", "hangs up",
    "half a request", "no request", "a wrong key", "many at once",
)  # fmt: skip
SHARE = 0.15  # of the episodes that it spoils
GATEWAY = urlsplit(os.environ["OPENAI_BASE_URL"])
KEY = os.environ["OPENAI_API_KEY"]


def main() -> None:
    task = json.load(sys.stdin)
    draw = random.Random(f"hostile {task['seed']}")
    kind = draw.choice(KINDS) if draw.random() < SHARE else ""
    said = ask(task["messages"])
    spoil(kind, task["messages"])
    if kind:
        said = ask(task["messages"])
    print(json.dumps(len(said) % 2))


def ask(messages: list[dict[str, Any]]) -> str:
    """Raises RuntimeError for anything but an answer."""
    connection = connect(json.dumps({"messages": messages}))
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {content[:200]!r}")
    return str(json.loads(content)["choices"][0]["message"]["content"])


def connect(body: str, key: str = KEY) -> http.client.HTTPConnection:
    """A connection that has sent a request."""
    connection = http.client.HTTPConnection(GATEWAY.netloc)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", f"{GATEWAY.path}/chat/completions", body, headers)
    return connection


def spoil(kind: str, messages: list[dict[str, Any]]) -> None:
    if kind == "hang":
        threading.Event().wait()
    elif kind == "exit":
        os._exit(3)
    elif kind == "raise":
        raise KeyError("an agent's own error")
    elif kind == "wrong type":
        end_with('{"outcome": "a text"}')
    elif kind == "no JSON":
        end_with("good")
    elif kind == "NaN":
        end_with("NaN")
    elif kind == "100 MB":
        end_with("x" * 100_000_000)
    elif kind == "daemon":
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)
    elif kind == "close descriptors":
        os.closerange(0, 64)
        os._exit(0)
    elif kind == "hangs up":
        connect(json.dumps({"messages": messages})).close()
    elif kind == "half a request":
        with socket.create_connection((GATEWAY.hostname, GATEWAY.port)) as half:
            half.sendall(f"POST {GATEWAY.path}/chat/completions HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{{".encode())
            threading.Event().wait()
    elif kind == "no request":
        assert connect('{"messages": 7}').getresponse().status == 400
    elif kind == "a wrong key":
        assert connect("{}", "another").getresponse().status in (401, 403)
    elif kind == "many at once":
        threads = [threading.Thread(target=ask, args=(messages,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def end_with(line: str) -> None:
    print(line, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
