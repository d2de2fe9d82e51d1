"""HTTP to one SGLang server: JSON calls, streamed events, translated errors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from grmpipe.models.engines.connections import Connections
from grmpipe.models.engines.network import NetworkPath
from grmpipe.models.engines.typed_json import NoAnswer, read_object
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
    """The server's message, in any of its four forms, on one line."""
    words = parse_error(as_json(response)) or replace_controls(" ".join(response.text.split())[:500])
    return words or f"HTTP {response.status_code}"


def parse_error(body: Json) -> str:
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or ""
    return replace_controls(" ".join(str(error).split())[:1000])


async def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Raises ConnectionError if the server doesn't answer in time."""
    try:
        async with asyncio.timeout(seconds):
            return await call()
    except TimeoutError:
        raise ConnectionError(f"weights: SGLang didn't answer within {seconds:g} s") from None
