"""A Ray of two nodes on this machine, each with its own address, working directory and environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
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
    nodes: list[subprocess.Popen[bytes]]
    cores: int

    def lose_second(self) -> None:
        """Kill Ray on the second node; its workers end with it."""
        node = self.nodes.pop(1)
        subprocess.run(["pkill", "-KILL", "-P", str(node.pid)], check=True)
        node.kill()
        node.wait(60)

    def add(self, name: str) -> None:
        """Let another node join."""
        options = [f"--address={self.address}", f"--node-ip-address={SECOND}"]
        self.nodes.append(start(self.folder / name, options, self.cores, self.environment))

    def launch(self, cwd: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """launch.py as a user starts it, on the head."""
        command = [sys.executable, str(ROOT / "launch.py"), f"cluster.address={self.address}", *overrides]
        return subprocess.run(
            command, cwd=cwd, env={**self.environment, **environment},
            capture_output=True, text=True, timeout=900, check=False,
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
        await_nodes(address, 1, environment)  # the second can't join before the head is up
        more = [f"--address={address}", f"--node-ip-address={SECOND}"]
        nodes.append(start(folder / "second", more, cores, {**environment, **(second or {})}))
        await_nodes(address, 2, environment)
        yield TwoNodes(address, environment, folder, nodes, cores)
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


def await_nodes(address: str, wanted: int, environment: Mapping[str, str]) -> None:
    """Wait as the scripts in deploy/ do."""
    command = [sys.executable, "-m", "grmpipe.scheduler.processes.await_nodes", address, str(wanted), "240"]
    subprocess.run(command, env=dict(environment), check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        return int(probe.getsockname()[1])
