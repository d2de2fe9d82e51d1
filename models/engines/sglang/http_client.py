"""HTTP to one SGLang server: JSON calls, streamed events, translated errors."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from transformers import AutoConfig, AutoTokenizer

from grmpipe.models.engines.connections import Connections
from grmpipe.models.engines.network import NetworkPath
from grmpipe.models.engines.typed_json import NoAnswer, read_as, read_object
from grmpipe.models.terminal_text import replace_controls
from grmpipe.models.types import EngineDied, EngineRefused

CONNECT_TIMEOUT_S, SEND_TIMEOUT_S = 10.0, 60.0
SILENCE_S = 3600.0  # between two parts of an answer: requests wait in the queue, and while generation is paused
EVENT = "data: "
Json = dict[str, Any]


class SglangHttp:
    """A client, bound to the event loop that first calls it. Callers have deadlines; an hour of silence counts as
    death.

    on_death: called once, when the server is found to be gone.
    post_mortem: more about a server that doesn't answer, for the message.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        post_mortem: Callable[[], str] = lambda: "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.death: EngineDied | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._post_mortem = post_mortem
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=make_headers(key),
            timeout=httpx.Timeout(SEND_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=SILENCE_S),
            trust_env=False,
            transport=transport or Connections(NetworkPath()),  # a proxy would see the paths of weights, break streams
        )

    def die(self, cause: str) -> EngineDied:
        """Let all calls from now on fail with the first cause of death. Returns an exception to raise."""
        if self.death is None:
            self.death = EngineDied(f"SGLang at {self.url} {cause}{self._post_mortem()}")
            self.on_death()
        return EngineDied(str(self.death))

    def refuse_the_dead(self) -> None:
        if self.death is not None:
            raise EngineDied(str(self.death))

    async def get(self, path: str) -> Json:
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Json) -> Json:
        """Raises EngineRefused with the server's message for 4xx, EngineDied if it is gone or broken."""
        return await self._call("POST", path, body)

    async def stream(self, path: str, body: Json) -> AsyncIterator[Json]:
        """The server-sent events of one answer. Leaving the iteration disconnects."""
        self.refuse_the_dead()
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._raise_for(response)
                async for line in response.aiter_lines():
                    if line.startswith(EVENT + "{"):
                        yield read_object(line.removeprefix(EVENT))
        except httpx.RequestError as error:
            raise self._gone(error) from None

    @contextmanager
    def die_if_unreadable(self) -> Iterator[None]:
        """Context: an answer that can't be read counts as the server's death, as a 5xx does: raises EngineDied."""
        try:
            yield
        except NoAnswer as error:
            raise self.die(f"gave an answer that can't be read: {error}") from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: Json | None) -> Json:
        self.refuse_the_dead()
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.RequestError as error:
            raise self._gone(error) from None
        self._raise_for(response)
        return as_json(response)

    def _raise_for(self, response: httpx.Response) -> None:
        if response.status_code >= 500:
            raise self.die(f"failed with HTTP {response.status_code}: {read_error(response)}")
        if response.status_code != 200:
            raise EngineRefused(f"SGLang at {self.url} refused: {read_error(response)}")

    def _gone(self, error: httpx.RequestError) -> EngineDied:
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return self.die(f"is gone ({cause})")


def make_headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def as_json(response: httpx.Response) -> Json:
    return read_object(response.content)  # some calls answer with plain text, or nothing


def read_error(response: httpx.Response) -> str:
    """The server's message, in any of its five forms, on one line."""
    words = parse_error(as_json(response)) or replace_controls(" ".join(response.text.split())[:500])
    return words or f"HTTP {response.status_code}"


def parse_error(body: Json) -> str:
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("error_message") or ""
    return replace_controls(" ".join(str(error).split())[:1000])


async def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Raises ConnectionError if the server doesn't answer in time."""
    try:
        async with asyncio.timeout(seconds):
            return await call()
    except TimeoutError:
        raise ConnectionError(f"weights: SGLang didn't answer within {seconds:g} s") from None


# -- a server that is joined: is it the one that the run needs; its own weights again ----------------------------------


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
