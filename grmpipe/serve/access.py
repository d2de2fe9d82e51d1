"""Who may ask the service: those who have its key, or those of this machine. What a client is told that may not."""

import base64
import binascii
import hmac
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

LOCAL = ("127.0.0.1", "localhost", "[::1]")  # a page of another name may not ask, whatever address it resolves to
RETRY_S = "1"


def refuse(status: int, words: str, allow: str | None = None) -> web.Response:
    headers = {"Retry-After": RETRY_S} if status == 429 else {"Allow": allow} if allow else {}
    return web.json_response({"error": words}, status=status, headers=headers)


def make_guard(key: str) -> Middleware:
    """The middleware that admits those who have the key, as a bearer or as the password of a URL; without a key, those
    of this machine.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key and request.path != "/health":
            _, given = read_credentials(request.headers)
            if not hmac.compare_digest(given.encode("utf-8", "replace"), key.encode()):
                return refuse(401, "the key is missing or wrong; send the header Authorization: Bearer <key>")
        elif not key and request.host.rsplit(":", 1)[0] not in LOCAL:
            return refuse(403, "without serve.key_env only this machine is answered, under 127.0.0.1 or localhost")
        return await handler(request)

    return guard


def read_client(request: web.Request) -> str:
    """Who asks, for a fair share: the name before the key of a URL, or the address."""
    return read_credentials(request.headers)[0] or request.remote or ""


def read_credentials(headers: Mapping[str, str]) -> tuple[str, str]:
    """Name and key: a bearer has no name."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            name, _, key = base64.b64decode(given, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return "", ""
        return name, key
    return "", given if kind.lower() == "bearer" else ""
