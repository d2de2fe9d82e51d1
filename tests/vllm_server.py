"""A real server of vLLM on this machine's cores, for tests of what asks one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

START_S = 240


@contextlib.contextmanager
def serve_vllm(folder: Path, model: str, flags: str) -> Iterator[str]:
    """The URL of a server that serves a model in float32 until the end of the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = f"--dtype float32 --max-model-len 512 --enforce-eager --port {port}"
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", model, *flags.split(), *common.split()]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM didn't start within {START_S} s: {log.read_text()[-3000:]}")
