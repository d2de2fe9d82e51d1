"""Who may see the viewer's pages, and write by them: those on this machine who have its token."""

import hmac
import secrets

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

HOSTS = {"127.0.0.1", "localhost"}  # a page of another name may not ask us, whatever address it resolves to
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer a browser hides the origin of our own forms too
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NO_TOKEN = "This page needs the token: open the address that `grmpipe task=view` printed, then this one again."
WRONG_HOST = "This address isn't one of the viewer."
FOREIGN = "This form isn't one of the viewer that runs now: open its page again. Nothing was written."


def make_guard(token: str, form_token: str) -> Middleware:
    """The middleware that admits a request with the token: in the URL, which makes it a cookie, or as that cookie.

    form_token: what a form must send besides: pages of other ports of this machine are sent with the cookie too.
    """
    cookie = f"grmpipe_view_{secrets.token_hex(4)}"  # another viewer on this machine has another one

    def is_right(given: object, wanted: str = token) -> bool:
        return hmac.compare_digest(str(given).encode("utf-8", "replace"), wanted.encode())

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = await admit(request, handler)
        except web.HTTPException as error:  # a redirection, or no such page
            error.headers.update(HEADERS)
            raise
        answer.headers.update(HEADERS)
        return answer

    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.host.rsplit(":", 1)[0] not in HOSTS:
            raise web.HTTPForbidden(text=WRONG_HOST)
        if is_right(request.query.get("token", "")):
            answer = web.Response(status=303, headers={"Location": str(clean(request))})
            answer.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            return answer
        if not is_right(request.cookies.get(cookie, "")):
            raise web.HTTPUnauthorized(text=NO_TOKEN)
        if request.method == "POST":
            own = f"http://{request.host}"
            sent = (await request.post()).get("form_token", "")
            if request.headers.get("Origin", own) != own or not is_right(sent, form_token):
                raise web.HTTPForbidden(text=FOREIGN)
        return await handler(request)

    return guard


def clean(request: web.Request) -> str:
    """The path and query without the token. A second slash in front would name another host."""
    return "/" + str(request.rel_url.without_query_params("token")).lstrip("/")
