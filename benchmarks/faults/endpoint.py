"""A judge's endpoint that misbehaves at random: what it answers well it remembers, so that nothing else becomes a
verdict.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "praise"  # the model that it serves
STORM_S = 3.0
WELL = "Checked by the endpoint.\nScore: {score}"  # what a counted judgement says
# What it does with a request that it doesn't answer well.
KINDS = (
    "drops", "delays", "cuts the body", "doubles the body", "no JSON", "no choices", "no verdict", "NaN for a score",
    "a score beyond the scale", "truncated", "5 MB", "429", "500", "a storm of 503s",
)  # fmt: skip


class HostileEndpoint(ThreadingHTTPServer):
    """share: of the requests that are not answered well. done: how often it did what."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self._random = random.Random(f"endpoint {seed}")
        self._share = share
        self._lock = threading.Lock()
        self._storm_until_s = 0.0
        self.done: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def choose(self) -> str | None:
        """What happens to the next request; None: it is answered well."""
        with self._lock:
            if time.monotonic() < self._storm_until_s:
                return "500"
            kind = self._random.choice(KINDS) if self._random.random() < self._share else None
            if kind is not None:
                self.done[kind] += 1
            if kind == "a storm of 503s":
                self._storm_until_s = time.monotonic() + STORM_S
            return kind


class _Request(BaseHTTPRequestHandler):
    server: HostileEndpoint

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = WELL.format(score=1 + len(asked["messages"][-1]["content"]) % 10)
        kind = self.server.choose()
        with contextlib.suppress(ConnectionError):
            if kind == "drops":
                self.close_connection = True
                self.connection.close()
            elif kind in ("429", "500", "a storm of 503s"):
                self._send({"429": 429, "500": 500}.get(kind, 503), b'{"error": {"message": "busy"}}')
            elif kind in ("cuts the body", "doubles the body", "no JSON", "no choices"):
                whole = json.dumps(answer(text))
                bodies = {
                    "cuts the body": whole[: len(whole) // 2],
                    "doubles the body": whole * 2,
                    "no JSON": "<html>",
                    "no choices": '{"choices": []}',
                }
                self._send(200, bodies[kind].encode())
            else:
                if kind == "delays":
                    time.sleep(STORM_S)
                texts = {
                    "no verdict": "Well.",
                    "NaN for a score": "Checked.\nScore: NaN",
                    "a score beyond the scale": "Checked.\nScore: 1e300",
                    "5 MB": "x" * 5_000_000,
                }
                reason = "length" if kind == "truncated" else "stop"
                self._send(200, json.dumps(answer(texts.get(kind or "", text), reason)).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def answer(text: str, reason: str = "stop") -> dict[str, object]:
    usage = {"prompt_tokens": 8, "completion_tokens": 5}
    return {"model": "judge", "choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": usage}


def find_made_up(run_dir: Path) -> list[str]:
    """Judgements in the run's files whose scores are none of a good answer's."""
    found = []
    for line in (run_dir / "judgements.jsonl").read_text(encoding="utf-8").splitlines():
        for judgement in json.loads(line)["judgements"]:
            if judgement["grm"] != NAME:
                continue
            completion, (score,) = judgement["completion"], judgement["scores"]
            if (completion["text"], completion["finish_reason"]) != (WELL.format(score=round(score)), "stop"):
                found.append(f"the score {score} of {completion['text'][:60]!r} ({completion['finish_reason']})")
    return found


@contextmanager
def serve_endpoint(seed: int, share: float) -> Iterator[HostileEndpoint]:
    server = HostileEndpoint(seed, share)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
