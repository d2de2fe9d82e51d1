"""What Ray runs where it starts a worker: asks the fork server for that process, or becomes it if nothing answers.

    python fork_client.py SOCKET default_worker.py [its arguments]

Run by its path, without the package: it imports nothing of ours, so that it takes no time.
"""

import json
import os
import socket
import sys


def is_forked(path: str, arguments: list[str]) -> bool:
    """Whether the fork server has made the process, with this one's environment, output and errors."""
    asked = json.dumps({"arguments": arguments, "environment": dict(os.environ)})
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(path)
            socket.send_fds(server, [b"\n"], [0, 1, 2])
            server.sendall(asked.encode())
            server.shutdown(socket.SHUT_WR)
            return bool(server.recv(1))
    except OSError:
        return False


if __name__ == "__main__":
    if not is_forked(sys.argv[1], sys.argv[2:]):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
