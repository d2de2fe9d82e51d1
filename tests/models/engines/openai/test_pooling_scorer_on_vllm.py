"""A real vLLM server gives the scores of our own scorer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from grmpipe.tiny.problems import make_problems
from grmpipe.tiny.resolve import SHIPPED
from models.chat.renderer import Renderer
from models.engines.openai.pooling_scorer import PoolingScorer
from models.engines.scorer import ScalarScorer, ScorerSpec
from models.settings import OpenAIConfig
from models.types import Message

pytestmark = [pytest.mark.vllm, pytest.mark.long]
MODEL, START_S = str(SHIPPED / "reward_model"), 240


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--served-model-name rm --runner pooling --dtype float32 --max-model-len 512 --enforce-eager --port {port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, *flags.split()]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "server.log"
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


def test_vllm_scores_as_our_own_scorer_does(url: str) -> None:
    renderer = Renderer.load(MODEL)
    conversations = [
        renderer.render_whole((Message(role="user", content=problem.question), Message(role="assistant", content=text)))
        for problem in make_problems("held_out", 4, 5)
        for text in (str(problem.solution), "I don't know.")
    ]

    async def asked() -> list[float]:
        scorer = PoolingScorer("rm", OpenAIConfig(base_url=url, api_key_env=""))
        try:
            return await asyncio.gather(*map(scorer.score, conversations))
        finally:
            await scorer.close()

    ours = ScalarScorer(ScorerSpec(path=MODEL)).scores(conversations)
    assert asyncio.run(asked()) == pytest.approx(ours, abs=1e-4)
    assert max(ours) - min(ours) > 5
