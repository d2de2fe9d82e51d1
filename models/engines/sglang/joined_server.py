"""Checks that a running SGLang server is the one that a run needs. Resets it to its own weights."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from transformers import AutoConfig, AutoTokenizer

from grmpipe.models.engines.sglang.http_client import as_json, make_headers, read_error
from grmpipe.models.engines.typed_json import NoAnswer, read_as
from grmpipe.models.terminal_text import replace_controls

T = TypeVar("T")
ANSWER_S = 10.0
RELOAD_S = 600.0
API_KEY = "SGLANG_API_KEY"  # the environment variable with the key of joined servers; started ones get a new key
PROBE = "Hällo <|im_end|></s> <|endoftext|>\n\t 3 + 4 = 7; 你好, \\boxed{12}  def f(x): return x**2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """version: the server's name of its weights. incremental: its events hold only new tokens."""

    version: str
    incremental: bool
    model_path: str


def read_api_key() -> str:
    """The key from the environment; empty if there is none: many servers need none."""
    return os.environ.get(API_KEY, "").strip()


class ServerInfo(msgspec.Struct):
    """What /server_info says: how the server was started."""

    model_path: str
    weight_version: str | int = "default"
    skip_tokenizer_init: bool | None = None
    incremental_streaming_output: bool | None = None


class ModelInfo(msgspec.Struct):
    """What /model_info says: what the server serves now."""

    weight_version: str | int | None = None
    architectures: list[str] | None = None


class ListedModel(msgspec.Struct):
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ListedModel] | None = None


class Tokens(msgspec.Struct):
    tokens: list[int] | None = None


def check_joined(url: str, key: str, model_path: str, context_tokens: int) -> Joined:
    """Raises ValueError that names engine.sglang.urls for a server that isn't there, or has another model."""
    with httpx.Client(base_url=url, headers=make_headers(key), timeout=ANSWER_S, trust_env=False) as client:
        server = _Server(client, url)
        info, now = server.get("/server_info", ServerInfo), server.get("/model_info", ModelInfo)
        server.refuse_another_model(model_path, info.model_path, now)
        server.refuse_a_shorter_window(context_tokens)
        if not info.skip_tokenizer_init:
            server.refuse_another_vocabulary(model_path)
        started_with = str(info.weight_version)
        if str(now.weight_version) != started_with:
            server.reload(info.model_path, started_with)
        server.post("/continue_generation", {})  # a run that ended during a push left it paused
        return Joined(
            version=started_with,
            incremental=bool(info.incremental_streaming_output),
            model_path=info.model_path,
        )


class _Server:
    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url = client, url

    def get(self, path: str, kind: type[T]) -> T:
        return self._read(path, kind, self._call("GET", path, None, ANSWER_S))

    def post(self, path: str, body: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        return self._call("POST", path, body, timeout_s)

    def refuse_another_model(self, model_path: str, served_path: str, now: ModelInfo) -> None:
        if name_model(served_path) != name_model(model_path):
            raise self._error(f"serves {served_path!r}, but the run's model is {model_path!r}")
        ours, theirs = AutoConfig.from_pretrained(model_path), now.architectures
        if theirs and ours.architectures and theirs != list(ours.architectures):
            raise self._error(f"serves a {theirs[0]}, but {model_path!r} is a {ours.architectures[0]}")

    def refuse_a_shorter_window(self, context_tokens: int) -> None:
        served = self.get("/v1/models", ModelList).data or [ListedModel()]
        window = served[0].max_model_len
        if window is not None and window < context_tokens:
            raise self._error(
                f"has a context window of {window} tokens, but the run needs {context_tokens}: start it with a longer "
                f"--context-length, or set engine.sglang.max_context_tokens={window}"
            )

    def refuse_another_vocabulary(self, model_path: str) -> None:
        asked = {"prompt": PROBE, "add_special_tokens": False}
        theirs = self._read("/tokenize", Tokens, self.post("/tokenize", asked)).tokens
        ours = AutoTokenizer.from_pretrained(model_path).encode(PROBE, add_special_tokens=False)
        if theirs != ours:
            raise self._error(f"has a different vocabulary than the tokenizer in {model_path!r}")

    def reload(self, model_path: str, version: str) -> None:
        body = {"model_path": model_path, "weight_version": version, "abort_all_requests": True}
        self.post("/update_weights_from_disk", body, RELOAD_S)

    def _read(self, path: str, kind: type[T], answer: dict[str, Any]) -> T:
        try:
            return read_as(kind, answer)
        except NoAnswer as error:
            raise self._error(f"answers {path} with what can't be read: {error}") from None

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=body, timeout=timeout_s)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise self._error(f"doesn't answer ({type(error).__name__}: {error})") from None
        if response.status_code == 401:
            raise self._error(f"expects another key than the one in the environment variable {API_KEY}")
        if response.status_code != 200:
            raise self._error(f"answers {path} with HTTP {response.status_code}: {read_error(response)}")
        return as_json(response)

    def _error(self, what: str) -> ValueError:
        return ValueError(replace_controls(f"engine.sglang.urls: the server at {self._url} {what}"))


def name_model(path: str) -> str:
    """The last part of a path or hub name; for the hub's cache, the name of the repository."""
    parts = Path(path.rstrip("/")).parts
    cached = [part for part in parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else parts[-1] if parts else "").casefold()
