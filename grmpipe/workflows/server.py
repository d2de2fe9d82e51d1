"""The gateway: the policy as OpenAI's chat completions on this machine, a key for each episode.

POST /v1/chat/completions    Authorization: Bearer <the episode's key>; streams are sent once they are complete
GET  /v1/models
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.util
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from grmpipe.workflows.chat import ChatRefused
from grmpipe.workflows.chat_json import (
    MODEL,
    STATUS,
    chunks_json,
    completion_json,
    error_json,
    parse_messages,
    read_request,
    tools_of_json,
)
from grmpipe.workflows.episode_chat import EpisodeChat
from grmpipe.workflows.policy import ChatEndpoint

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 32 * 2**20
REQUEST_S = 60.0  # for the headers of a request to come, then for its body; idle connections are closed after it
SECRET_BYTES = 32
REMEMBERED_ENDED = 4096  # keys of ended episodes, whose late requests get a clear answer
INSTALL = "runs_in: a workflow that asks at a URL needs aiohttp; type: pip install 'grmpipe[gateway]'"


def check_gateway_installed() -> None:
    """Raises ValueError if there is no aiohttp."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ValueError(INSTALL)


class WrongKey(Exception):
    """The request has no key, or an unknown one."""


class Gateway:
    """The server of a run. It starts with the first episode that asks for its URL."""

    def __init__(self) -> None:
        self._url = ""
        self._starting: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._episodes: dict[str, tuple[str, EpisodeChat]] = {}  # public part of the key -> its secret, the episode
        self._ended: dict[str, str] = {}  # the same without episodes
        self._overridden: set[str] = set()
        self._num_admitted = 0

    def admit(self, episode: EpisodeChat) -> ChatEndpoint:
        """Give an episode a key. Connections wait until the server has started."""
        if not self._url:
            self._begin()
        self._num_admitted += 1
        public, secret = str(self._num_admitted), secrets.token_urlsafe(SECRET_BYTES)
        self._episodes[public] = secret, episode
        return ChatEndpoint(base_url=self._url, api_key=f"grmpipe-{public}-{secret}")

    def dismiss(self, episode: EpisodeChat) -> None:
        """Take the episode's keys back."""
        for public in [public for public, (_, one) in self._episodes.items() if one is episode]:
            self._ended[public], _ = self._episodes.pop(public)
        while len(self._ended) > REMEMBERED_ENDED:
            del self._ended[next(iter(self._ended))]

    async def close(self) -> None:
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._runner is not None:
            await self._runner.cleanup()

    def _begin(self) -> None:
        check_gateway_installed()
        listening = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._url = f"http://{LOOPBACK}:{listening.getsockname()[1]}/v1"
        self._starting = asyncio.get_running_loop().create_task(self._start(listening))

    async def _start(self, listening: socket.socket) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_json()])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        # A client that hangs up ends its request: nothing is sampled for it.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=REQUEST_S
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()
        log.info("the gateway of workflows listens at %s", self._url)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode_of(request)
        chat, overridden = read_request(await read_body(request))
        self._report(overridden)
        reply = await episode.chat(parse_messages(chat.messages), tools_of_json(chat.tools), chat.options)
        created_s = int(time.time())
        if not chat.stream:
            return as_json(completion_json(reply, chat.model, created_s))
        return await stream_chunks(request, list(chunks_json(reply, chat.model, created_s, with_usage=chat.with_usage)))

    async def _models(self, request: web.Request) -> web.Response:
        self._episode_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "grmpipe"}
        return as_json({"object": "list", "data": [model]})

    def _episode_of(self, request: web.Request) -> EpisodeChat:
        """The episode of the request's key, whose secret is compared in constant time."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        _, _, rest = key.strip().partition("-")
        public, _, given = rest.partition("-")
        secret, episode = self._episodes.get(public, (self._ended.get(public), None))
        if kind.lower() != "bearer" or secret is None or not hmac.compare_digest(secret.encode(), to_bytes(given)):
            raise WrongKey
        if episode is None:
            raise ChatRefused("session_ended", "the episode of this key has ended: its policy answers no more")
        return episode

    def _report(self, overridden: tuple[str, ...]) -> None:
        """Report once what requests ask in vain."""
        if new := set(overridden) - self._overridden:
            self._overridden |= new
            log.warning(
                "a workflow asks for %s: without effect, since the run samples all turns alike", ", ".join(sorted(new))
            )


def to_bytes(text: str) -> bytes:
    """A part of a header as it was sent: aiohttp reads bytes that are no UTF-8 as half characters."""
    return text.encode("utf-8", "surrogateescape")


async def read_body(request: web.Request) -> bytes:
    """The body. Raises HTTPRequestTimeout if it doesn't come within REQUEST_S."""
    from aiohttp import web

    try:
        async with asyncio.timeout(REQUEST_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def errors_as_json() -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware: every error in OpenAI's form."""
    from aiohttp import web

    @web.middleware
    async def answered(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except ChatRefused as refused:
            return as_json(error_json(str(refused), refused.code), STATUS[refused.code])
        except WrongKey:
            return as_json(error_json("the key is none of an episode of this run", "invalid_api_key"), 401)
        except web.HTTPRequestEntityTooLarge:
            return as_json(error_json(f"the body has more than {MAX_BODY_BYTES} bytes", "request_too_large"), 413)
        except web.HTTPRequestTimeout:
            text = f"the body didn't come within {REQUEST_S:g} s"
            response = as_json(error_json(text, "request_timeout"), 408)
            response.force_close()
            return response
        except web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}; known: POST /v1/chat/completions, GET /v1/models"
            return as_json(error_json(text, "not_found"), error.status)
        except Exception as error:  # ours: the episode has it, too, if it failed there
            log.exception("a request to the gateway failed")
            return as_json(error_json(f"{type(error).__name__}: {error}", "internal_error"), 500)

    return answered


def as_json(body: dict[str, Any], status: int = 200) -> web.Response:
    from aiohttp import web

    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def stream_chunks(request: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response
