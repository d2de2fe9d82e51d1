"""An SGLang server that replays a real one's answers, and the recorder that recorded them.

A cassette holds the exchanges of one test, in order. A request finds its exchange by path, body and the number of
versions committed before. Each event of a stream waits for as many pauses, continues and commits as when it was
recorded, and for the abort of its request if it came after that. So a replay keeps the order of cause and effect at any
speed. Recordings leave out texts, times, and fields that the engine doesn't read.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

RECORDED = Path(__file__).parent / "recorded" / "sglang"
CONTROLS = ("/pause_generation", "/continue_generation", "/update_weight_version")
PACE_S = 0.003  # between two events: a reader handles one before the next comes
READ = ("completion_tokens", "prompt_tokens", "cached_tokens", "weight_version", "weight_versions", "finish_reason")
LOGPROBS = ("output_token_logprobs", "output_token_sampling_logprobs", "input_token_logprobs")
Json = dict[str, Any]


def cassette_of(node_name: str) -> Path:
    """The file of a test, by its name and parameters."""
    return RECORDED / (re.sub(r"\W+", "_", re.sub(r"sglang(_replayed)?-?", "", node_name)).strip("_") + ".json")


def essence(path: str, body: Json) -> str:
    """The essential parts of a request: without its random names, and paths of files and sockets."""
    if path != "/generate":
        return ""
    return json.dumps({name: value for name, value in body.items() if name not in ("rid", "extra_key")}, sort_keys=True)


def slimmed(reply: Json) -> Json:
    """The parts of an answer that the engine reads, with log-probs to six digits."""
    if "meta_info" not in reply:
        return {name: reply[name] for name in ("weight_version", "success", "message", "error") if name in reply}
    meta = {name: reply["meta_info"][name] for name in READ if reply["meta_info"].get(name) is not None}
    for name in LOGPROBS:
        if reply["meta_info"].get(name):
            meta[name] = [_rounded(logprob) for logprob in reply["meta_info"][name]]
    return {"output_ids": reply["output_ids"], "meta_info": meta}


def restored(reply: Json) -> Json:
    """The answer as the server sent it, except for unread fields."""
    meta = reply.get("meta_info")
    if meta is None:
        return reply
    whole = {"finish_reason": None, "output_token_logprobs": [], **meta}
    for name in ("output_token_logprobs", "input_token_logprobs"):
        whole[name] = [[logprob, 0, None] for logprob in whole.get(name, [])]
    return {**reply, "meta_info": whole}


def _rounded(logprob: Any) -> float | None:
    value = logprob[0] if isinstance(logprob, list) else logprob
    return None if value is None else round(value, 6)


# -- recording -----------------------------------------------------------------------------------------------------


class Recorder(httpx.AsyncBaseTransport):
    """A recorder between an engine and a real server. `begin` and `save` are called around each test."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self.begin()

    def begin(self) -> None:
        self.exchanges: list[Json] = []
        self._num_controls = self._num_commits = 0
        self._aborted: set[str] = set()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(exchange, separators=(",", ":")) for exchange in self.exchanges)
        path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        exchange: Json = {"path": path, "body": essence(path, body), "commits": self._num_commits}
        self.exchanges.append(exchange)
        self._num_controls += path in CONTROLS
        if path == "/abort_request":
            self._aborted.add(body["rid"])
        response = await self._inner.handle_async_request(request)
        if body.get("stream") and response.status_code == 200:
            exchange["events"] = []
            stream = Recorded(self._noted(response.stream, exchange, body["rid"]), response.stream)
            return httpx.Response(200, headers=response.headers, stream=stream)
        content = await response.aread()
        self._num_commits += path == "/update_weight_version"
        exchange |= {"status": response.status_code, "reply": slimmed(_json(content))}
        return httpx.Response(response.status_code, headers=response.headers, content=content)

    async def _noted(self, stream: Any, exchange: Json, rid: str) -> AsyncIterator[bytes]:
        held = b""
        async for chunk in stream:
            *lines, held = (held + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    event = slimmed(json.loads(line.removeprefix(b"data: ")))
                    exchange["events"].append([self._num_controls, rid in self._aborted, event])
                elif line.startswith(b"data: [DONE]"):
                    exchange["done"] = True
            yield chunk


class Recorded(httpx.AsyncByteStream):
    def __init__(self, chunks: AsyncIterator[bytes], inner: Any) -> None:
        self._chunks, self._inner = chunks, inner

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks

    async def aclose(self) -> None:
        await self._inner.aclose()


def _json(content: bytes) -> Json:
    try:
        body = json.loads(content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


# -- replaying -----------------------------------------------------------------------------------------------------


@dataclass
class Cassette:
    """The exchanges that haven't been replayed yet; the last of a kind is replayed again and again."""

    exchanges: list[Json]
    num_controls: int = 0
    num_commits: int = 0
    aborted: set[str] = field(default_factory=set)

    def take(self, path: str, body: str) -> Json | None:
        found = [e for e in self.exchanges if e["path"] == path and e["body"] == body]
        found = [e for e in found if path != "/generate" or e["commits"] == self.num_commits]
        if len(found) > 1:
            self.exchanges.remove(found[0])
        return found[0] if found else None


class ReplayServer(ThreadingHTTPServer):
    """`load` a cassette before each test."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cassette = Cassette([])
        self.changed = threading.Condition()
        self.closing = False
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def load(self, path: Path) -> None:
        with self.changed:
            self.cassette = Cassette(json.loads(path.read_text(encoding="utf-8")))
            self.changed.notify_all()

    def close(self) -> None:
        self.closing = True
        with self.changed:
            self.changed.notify_all()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: ReplayServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._replay({})

    def do_POST(self) -> None:
        self._replay(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *args: object) -> None:
        pass

    def _replay(self, body: Json) -> None:
        with self.server.changed:
            cassette = self.server.cassette
            exchange = cassette.take(self.path, essence(self.path, body))
            cassette.num_controls += self.path in CONTROLS
            cassette.num_commits += self.path == "/update_weight_version"
            if self.path == "/abort_request":
                cassette.aborted.add(body["rid"])
            self.server.changed.notify_all()
        if exchange is None:
            known = self.path in ("/abort_request", "/server_info")  # a cancelled call may be too late to be recorded
            self._answer(200 if known else 500, {} if known else {"error": f"not recorded: {self.path} {body}"})
        elif "events" in exchange:
            self._stream(cassette, exchange, body["rid"])
        else:
            self._answer(exchange["status"], restored(exchange["reply"]))

    def _answer(self, status: int, reply: Json) -> None:
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, cassette: Cassette, exchange: Json, rid: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for event in self._due(cassette, exchange, rid):
                self.wfile.write(b"data: " + json.dumps(restored(event)).encode() + b"\n\n")
                self.wfile.flush()
                time.sleep(PACE_S)
            if exchange.get("done"):
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                self.connection.recv(1)  # until the client disconnects, as it did
        except OSError:
            pass  # it disconnected earlier

    def _due(self, cassette: Cassette, exchange: Json, rid: str) -> Iterator[Json]:
        for num_controls, aborted, event in exchange["events"]:
            with self.server.changed:
                self.server.changed.wait_for(
                    lambda n=num_controls, aborted=aborted: (
                        (cassette.num_controls >= n and (not aborted or rid in cassette.aborted))
                        or self.server.cassette is not cassette
                        or self.server.closing
                    )
                )
                if self.server.cassette is not cassette or self.server.closing:
                    return
            yield event
