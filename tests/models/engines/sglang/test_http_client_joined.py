"""Joining a running server: it must be the one that the run needs, and gets its own weights back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.http_client import check_joined, name_model
from grmpipe.models.engines.sglang.sglang_engine import SglangEngine
from grmpipe.models.settings import SglangConfig


class Theirs(ThreadingHTTPServer):
    """A server with replies by path; records its requests."""

    daemon_threads = True

    def __init__(self, model_path: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.key: str | None = None
        named = {"model_path": f"/other/machine/{Path(model_path).name}", "weight_version": "default"}
        self.replies: dict[str, dict[str, Any]] = {
            "/server_info": {**named, "incremental_streaming_output": True},
            "/model_info": {**named, "architectures": ["Qwen3ForCausalLM"]},
            "/v1/models": {"data": [{"max_model_len": 128}]},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Theirs
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: dict[str, Any]) -> None:
        self.server.asked.append((self.path, body))
        self.server.keys.add(self.headers["Authorization"])
        reply = self.server.replies.get(self.path, {})
        if self.path == "/tokenize" and not reply:
            reply = {"tokens": self.server.tokenizer.encode(body["prompt"], add_special_tokens=False)}
        allowed = self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}"
        data = json.dumps(reply).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def theirs(model_path: str) -> Iterator[Theirs]:
    server = Theirs(model_path)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def join(url: str, model_path: str, **options: Any) -> SglangEngine:
    config = SglangConfig(urls=[url], **options)
    return SglangEngine.join(url, EngineSpec(path=model_path, role="policy"), config)


def test_the_right_server_is_joined_and_left_alone(theirs: Theirs, model_path: str) -> None:
    engine = join(theirs.url, model_path)
    assert engine.version == 0 and engine.process_ids() == []
    paths = [path for path, _ in theirs.asked]
    assert "/update_weights_from_disk" not in paths
    assert paths[-1] == "/continue_generation"  # a dead run may have left it paused
    assert theirs.keys == {None}
    engine.close()


def test_the_key_comes_from_the_environment_and_a_wrong_one_names_its_variable(
    theirs: Theirs, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs.key = "theirs"
    with pytest.raises(ValueError, match=r"engine\.sglang\.urls: .*SGLANG_API_KEY"):
        join(theirs.url, model_path)
    monkeypatch.setenv("SGLANG_API_KEY", "theirs")
    join(theirs.url, model_path).close()


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("/server_info", {"model_path": "/models/other"}, "serves '/models/other'"),
        ("/model_info", {"architectures": ["LlamaForCausalLM"]}, "serves a LlamaForCausalLM"),
        ("/v1/models", {"data": [{"max_model_len": 64}]}, r"window of 64 .* set engine\.sglang\.max_context_tokens=64"),
        ("/tokenize", {"tokens": [1, 2, 3]}, "different vocabulary"),
    ],
)
def test_another_model_vocabulary_or_a_shorter_window_is_refused(
    theirs: Theirs, model_path: str, path: str, change: dict[str, Any], words: str
) -> None:
    theirs.replies[path] = theirs.replies.get(path, {}) | change
    with pytest.raises(ValueError, match=rf"engine\.sglang\.urls: the server at http://.* {words}"):
        join(theirs.url, model_path)


@pytest.mark.parametrize(
    ("path", "reply"),
    [
        ("/server_info", {}),
        ("/server_info", {"model_path": ["x"]}),
        ("/model_info", {"architectures": {"a": 1}}),
        ("/v1/models", {"data": [["x"]]}),
        ("/v1/models", {"data": [{"max_model_len": "128"}]}),
        ("/tokenize", {"tokens": "1 2 3"}),
    ],
)
def test_a_server_that_answers_what_cant_be_read_is_refused_by_its_path(
    theirs: Theirs, model_path: str, path: str, reply: dict[str, Any]
) -> None:
    theirs.replies[path] = reply
    with pytest.raises(ValueError, match=rf"^engine\.sglang\.urls: .* answers {path} with what can't be read: "):
        join(theirs.url, model_path)


def test_a_shorter_window_will_do_where_the_run_asks_for_no_more(theirs: Theirs, model_path: str) -> None:
    theirs.replies["/v1/models"] = {"data": [{"max_model_len": 64}]}
    join(theirs.url, model_path, max_context_tokens=64).close()


def test_weights_that_an_earlier_run_sent_are_replaced_by_the_servers_own(theirs: Theirs, model_path: str) -> None:
    theirs.replies["/model_info"]["weight_version"] = "37"
    join(theirs.url, model_path).close()
    (reload,) = [body for path, body in theirs.asked if path == "/update_weights_from_disk"]
    assert reload["model_path"] == theirs.replies["/server_info"]["model_path"]
    assert (reload["weight_version"], reload["abort_all_requests"]) == ("default", True)


def test_unreachable_server_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"engine\.sglang\.urls: the server at http://127\.0\.0\.1:9 doesn't answer"):
        check_joined("http://127.0.0.1:9", "", "m", 128)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("/models/Qwen3-8B/", "qwen3-8b"),
        ("/c/hub/models--Qwen--Qwen3-8B/snapshots/0123abc", "qwen3-8b"),
    ],
)
def test_a_model_has_one_name_by_path_hub_and_cache(path: str, name: str) -> None:
    assert name_model(path) == name
