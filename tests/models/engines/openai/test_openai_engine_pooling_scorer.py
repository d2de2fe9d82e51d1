"""A remote reward model over real HTTP: token ids are sent, raw scores are read, and what is no score is never one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.openai.openai_engine import PoolingScorer
from grmpipe.models.settings import OpenAIConfig
from grmpipe.models.types import EngineDied, EngineRefused

KEY = "sk-never-to-be-seen-0123456789"


class Endpoint(ThreadingHTTPServer):
    """Answers by a script of (status, body), and repeats its last line."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[tuple[int, object]] = [(200, classified(1.5))]
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        script = self.server.script
        status, answer = script.pop(0) if len(script) > 1 else script[0]
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def classified(*numbers: object, model: str = "rm") -> dict[str, Any]:
    """As vLLM's /classify answers."""
    entry = {"index": 0, "label": "LABEL_0", "probs": list(numbers), "num_classes": len(numbers)}
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    return {"id": "classify-1", "object": "list", "model": model, "data": [entry], "usage": usage}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("RM_KEY", KEY)
    monkeypatch.setattr("grmpipe.models.engines.openai.endpoint_client.FIRST_BACKOFF_S", 0.01)
    server = Endpoint()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def scored(endpoint: Endpoint, token_ids: tuple[int, ...] = (5, 6, 7), base: str = "/v1", **options: Any) -> float:
    config = OpenAIConfig(base_url=endpoint.url + base, api_key_env="RM_KEY", **{"max_retries": 2, **options})

    async def ask() -> float:
        scorer = PoolingScorer("org/rm", config, use=EndpointUse(model_key="models.safety"))
        try:
            return await scorer.score(token_ids)
        finally:
            await scorer.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
def test_vllm_is_asked_for_the_score_of_token_ids_without_its_sigmoid(endpoint: Endpoint, base: str) -> None:
    assert scored(endpoint, base=base) == 1.5
    ((path, body, key),) = endpoint.asked
    assert path == "/classify" and key == f"Bearer {KEY}"
    assert body == {"model": "org/rm", "input": [5, 6, 7], "use_activation": False}


def test_sglang_is_asked_by_its_embeddings_whose_one_number_is_the_score(endpoint: Endpoint) -> None:
    entry = {"object": "embedding", "index": 0, "embedding": [-3.25]}
    endpoint.script = [(200, {"object": "list", "model": "org/rm", "data": [entry], "usage": {"total_tokens": 3}})]
    assert scored(endpoint, scores="embeddings", extra_body={"priority": 1}) == -3.25
    ((path, body, _),) = endpoint.asked
    assert path == "/v1/embeddings"
    assert body == {"model": "org/rm", "input": [5, 6, 7], "encoding_format": "float", "priority": 1}


def test_a_busy_endpoint_is_asked_again(endpoint: Endpoint) -> None:
    endpoint.script = [(503, {}), (200, {"data": []}), (200, classified(0))]
    assert scored(endpoint) == 0.0
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"data": [{"probs": []}]}, "it has 0 numbers"),
        ({"data": [{"probs": ["1.5"]}]}, "Expected `float`, got `str` - at .*probs"),
        ({"data": [{"probs": [True]}]}, "Expected `float`, got `bool` - at .*probs"),
        ({"data": [{"probs": [None]}]}, "Expected `float`, got `null` - at .*probs"),
        ({"data": [[1.5]]}, "Expected `object`, got `array` - at .*data"),
        ({"data": []}, "it has no result"),
        ({}, "Object missing required field `data`"),
        ([1.5], "Object missing required field `data`"),
    ],
)
def test_an_answer_without_a_score_never_becomes_one(endpoint: Endpoint, answer: object, words: str) -> None:
    endpoint.script = [(200, answer)]
    with pytest.raises(EngineDied, match=f"in 2 attempts .*an answer without a score: {words}"):
        scored(endpoint, max_retries=1)


def test_a_refusal_of_the_endpoint_is_raised_without_the_key(endpoint: Endpoint) -> None:
    endpoint.script = [(400, {"error": {"message": f"9 tokens exceed 8, {KEY}"}})]
    with pytest.raises(EngineRefused, match=r"127\.0\.0\.1 refused with HTTP 400: 9 tokens exceed 8, \*\*\*"):
        scored(endpoint)
    assert len(endpoint.asked) == 1


def test_a_model_with_two_classes_ends_the_run_by_its_key(endpoint: Endpoint) -> None:
    endpoint.script = [(200, classified(0.2, 0.8))]
    with pytest.raises(ValueError, match=r"^models\.safety\.path: .* gave 2 numbers for one conversation"):
        scored(endpoint)


def test_another_model_than_the_one_asked_ends_the_run_by_its_key(endpoint: Endpoint) -> None:
    endpoint.script = [(200, classified(1.0, model="gpt-2"))]
    with pytest.raises(ValueError, match=r"^models\.safety\.path: .* was asked for 'org/rm', but 'gpt-2' answered"):
        scored(endpoint)


@pytest.mark.parametrize("field", ["use_activation", "input"])
def test_a_further_field_cant_replace_ours(endpoint: Endpoint, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^engine\.openai\.extra_body: '{field}' is set by the run itself"):
        scored(endpoint, extra_body={field: True})


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(ValueError, match="^scores: unknown value 'score'; known: classify, embeddings"):
        OpenAIConfig(scores="score")
