"""A Ray of two nodes on this machine, each with its own address, working directory and environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD, SECOND = "127.0.0.1", "127.0.0.2"


@dataclass(frozen=True, slots=True)
class TwoNodes:
    """address: of the head. environment: of a driver, with the token of Ray's sockets."""

    address: str
    environment: Mapping[str, str]
    folder: Path

    def launch(self, cwd: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """launch.py as a user starts it, on the head."""
        command = [sys.executable, str(ROOT / "launch.py"), f"cluster.address={self.address}", *overrides]
        return subprocess.run(
            command, cwd=cwd, env={**self.environment, **environment},
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip


@contextmanager
def two_nodes(folder: Path, cores: int = 2, second: Mapping[str, str] | None = None) -> Iterator[TwoNodes]:
    """Context. Each node has this many cores. second: environment variables of the second node's processes."""
    (folder / "token").write_text("0" * 32)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **token}
    port = free_port()
    address = f"{HEAD}:{port}"
    head = ["--head", f"--port={port}", f"--node-ip-address={HEAD}", "--include-dashboard=false"]
    nodes = [start(folder / "head", head, cores, environment)]
    try:
        wait_for(lambda: answers(port))
        more = [f"--address={address}", f"--node-ip-address={SECOND}"]
        nodes.append(start(folder / "second", more, cores, {**environment, **(second or {})}))
        wait_for(lambda: num_alive(address, environment) == 2)
        yield TwoNodes(address, environment, folder)
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait(60)


def start(folder: Path, options: list[str], cores: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    folder.mkdir()
    ray = str(Path(sys.executable).with_name("ray"))
    named = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export")
    ports = [f"--{name}-port={free_port()}" for name in named]
    command = [ray, "start", "--block", *options, *ports, f"--num-cpus={cores}", "--object-store-memory=100000000"]
    with (folder / "ray.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=dict(environment), stdout=log, stderr=log)


def num_alive(address: str, environment: Mapping[str, str]) -> int:
    """Nodes that have joined, as a script that waits for them counts."""
    count = "import ray; ray.init(address='{}', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
    found = subprocess.run(
        [sys.executable, "-c", count.format(address)], env=dict(environment),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return int(found.stdout.strip() or 0) if found.returncode == 0 else 0


def wait_for(condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "Ray did not come up"
        time.sleep(0.3)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HEAD, port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        return int(probe.getsockname()[1])
