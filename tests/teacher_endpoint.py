"""A server that answers /v1/completions with `prompt_logprobs`, as vLLM's does, by a tiny model."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grmpipe.models.lm.score import ScoredText, score_sequences
from grmpipe.models.types import PromptScoring
from grmpipe.tiny.resolve import resolve_model


class TeacherServer(ThreadingHTTPServer):
    """script: status codes of the first answers; later ones are 200. without: leaves the field out."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = (
            AutoModelForCausalLM.from_pretrained(resolve_model(path), dtype=torch.float32).eval().requires_grad_(False)
        )
        self.lock = threading.Lock()
        self.script: list[int] = []
        self.without = False
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.asked.append(asked)
            status = self.script.pop(0) if self.script else 200
            if status != 200:
                return status, {"error": {"message": "busy"}}
            prompt, top_k = asked["prompt"], asked["prompt_logprobs"]
            scoring = PromptScoring(start=1, top_k=max(1, top_k))
            (scores,) = score_sequences(self.model, [ScoredText(tuple(prompt), scoring)])
        assert scores.top_ids_NK is not None and scores.top_logprobs_NK is not None
        entries: list[dict[str, Any] | None] = [None]
        for place, token_id in enumerate(prompt[1:]):
            best = zip(scores.top_ids_NK[place, :top_k], scores.top_logprobs_NK[place, :top_k], strict=True)
            entry = {str(one): {"logprob": float(value), "rank": rank} for rank, (one, value) in enumerate(best, 1)}
            own = {"logprob": float(scores.logprobs_N[place]), "rank": 1 + top_k}
            entries.append({str(token_id): own} | entry)
        choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": entries}
        if self.without:
            del choice["prompt_logprobs"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        return 200, {"model": asked["model"], "choices": [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    server: TeacherServer

    def do_POST(self) -> None:
        assert self.path == "/v1/completions"
        status, answer = self.server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps(answer).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextlib.contextmanager
def serve_teacher(path: str) -> Iterator[TeacherServer]:
    server = TeacherServer(path)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
