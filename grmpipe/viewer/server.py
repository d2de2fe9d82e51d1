"""The server of the viewer: on this machine only, and only for those who have its token.

GET /                    the runs of the folder, or the only one
GET /<page>/<run>?..     a page of a run, by its name: see PAGES
GET /compare?a=..&b=..   two runs; with a prompt, their answers to it
GET /state/<run>         how far its index is, as JSON
GET /next/<run>?..       to the next answer of the queue
POST /annotate/<run>?..  an annotation of what the query names, or the rater's name; then back to the page
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote, unquote, urlencode

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from grmpipe.config.task_settings import AnnotateConfig
from grmpipe.viewer import pages
from grmpipe.viewer.annotate_pages import NotThere, Rater, annotate, find_next_link
from grmpipe.viewer.annotations import parse_rater
from grmpipe.viewer.figures import keep_figures
from grmpipe.viewer.index import IndexProgress
from grmpipe.viewer.runs import ViewedRun, check_readable, find_runs, tell_apart

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PORT = 8707  # if it is free: a tunnel to it keeps working
STATIC = {"style.css": "text/css", "follow.js": "text/javascript", "keys.js": "text/javascript"}
RATER = "grmpipe_rater"  # the cookie with the rater's name
DEFAULTS = AnnotateConfig()
A_YEAR_S = 365 * 24 * 3600
WRITES = "annotations can't be kept: {}; give the right to read and write there, or type annotate.dir=<a folder>"


def view(folder: Path, port: int = PORT, *, settings: AnnotateConfig = DEFAULTS, seed: int = 0) -> None:
    """Serve the runs of a folder until a signal ends it. Raises ConfigError."""
    runs = find_runs(folder)
    check_readable(runs)
    asyncio.run(serve(Viewer(folder, runs, settings, seed), port))


async def serve(viewer: Viewer, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(viewer.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        taken = await listen(runner, port)
        print(f"grmpipe: http://{LOOPBACK}:{taken}/?token={viewer.token} shows them; Ctrl-C ends it", flush=True)
        viewer.indexer.start()
        await ended.wait()
    finally:
        viewer.indexer.stop()
        await runner.cleanup()


async def listen(runner: web.AppRunner, port: int) -> int:
    """The port: the wanted one if it is free, else any."""
    try:
        await web.TCPSite(runner, LOOPBACK, port).start()
    except OSError:
        await web.TCPSite(runner, LOOPBACK, 0).start()
    return int(runner.addresses[0][1])


class Viewer:
    """The runs of a folder, and their pages."""

    def __init__(
        self, folder: Path, runs: Mapping[str, ViewedRun], settings: AnnotateConfig = DEFAULTS, seed: int = 0
    ) -> None:
        """seed: of the queue."""
        self.token, self.form_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._settings, self._seed = settings, seed
        self.indexer = Indexer()
        self._folder = folder
        self._runs = dict(runs)
        self._environment = pages.make_environment()
        self._environment.globals["form_token"] = self.form_token
        self._static = {name: (files("grmpipe.viewer") / "static" / name).read_bytes() for name in STATIC}
        look = files("grmpipe.observe") / "templates" / "look.css"
        self._static["style.css"] = look.read_bytes() + self._static["style.css"]
        if len(self._runs) == 1:
            self.indexer.watch(next(iter(self._runs.values())))

    def app(self) -> web.Application:
        app = web.Application(middlewares=[make_guard(self.token, self.form_token), self._explain])
        app.router.add_get("/", self._runs_page)
        app.router.add_get("/static/{name}", self._static_file)
        app.router.add_get("/compare", self._compare_page)
        app.router.add_get("/state/{run:.+}", self._state)
        app.router.add_get("/next/{run:.+}", self._next)
        app.router.add_post("/annotate/{run:.+}", self._annotate)
        app.router.add_get("/{page:" + "|".join(pages.PAGES) + "}/{run:.+}", self._run_page)
        return app

    @web.middleware
    async def _explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors of what the URL or a form asks for, in words, beside the note that was typed."""
        note = str((await request.post()).get("note", ""))  # of a GET: nothing
        try:
            return await handler(request)
        except NotThere as error:
            return self._message(404, str(error), note)
        except ValueError as error:  # of a query that was typed
            return self._message(400, str(error), note)
        except RecursionError:
            return self._message(400, "a file of this run is nested too deeply")
        except OSError as error:  # of the annotations' file: no page writes anything else
            if isinstance(error, ConnectionError):
                raise
            return self._message(500, WRITES.format(error), note)
        except sqlite3.OperationalError:  # the index is being made, or made anew
            run = self._runs.get(request.match_info.get("run", ""))
            return self._page("waiting", {"run": run}, status=503)

    # -- pages ---------------------------------------------------------------------------------------------------------

    async def _run_page(self, request: web.Request) -> web.StreamResponse:
        run, page, rater = self._run(request.match_info["run"]), request.match_info["page"], self._rater(request)
        if not run.index.path.exists():
            return self._page("waiting", {"run": run})
        return await asyncio.to_thread(
            lambda: self._page(page, {"run": run, "rater": rater, **pages.PAGES[page](run, request.query, rater)})
        )

    async def _next(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request.match_info["run"])
        found = await asyncio.to_thread(find_next_link, run, request.query, self._rater(request))
        raise web.HTTPSeeOther(pages.link("group", run.name, urlencode(found)))

    async def _annotate(self, request: web.Request) -> web.StreamResponse:
        """Answers once the annotation is on the disk."""
        run = self._run(request.match_info["run"])
        form = {name: value for name, value in (await request.post()).items() if isinstance(value, str)}
        if "rater" in form:
            page = "group" if "group" in request.query else "annotations"
            back = self._go_on(request, pages.link(page, run.name, urlencode(request.query)))
            name = quote(parse_rater(form["rater"]))
            back.set_cookie(RATER, name, max_age=A_YEAR_S, httponly=True, samesite="Strict", path="/")
            return back
        page, found = await asyncio.to_thread(annotate, run, request.query, form, self._rater(request))
        about = request.query.get("about", "")
        place = f"#sibling-{about}" if about.isdecimal() and "sibling" not in found and page == "group" else ""
        return self._go_on(request, pages.link(page, run.name, urlencode(found)) + place)

    def _go_on(self, request: web.Request, to: str) -> web.Response:
        """To the page behind a form: for keys.js as JSON."""
        if "application/json" in request.headers.get("Accept", ""):
            return web.json_response({"to": to})
        return web.Response(status=303, headers={"Location": to})

    async def _runs_page(self, request: web.Request) -> web.StreamResponse:
        self._runs = await asyncio.to_thread(find_runs, self._folder)
        if len(self._runs) == 1:
            raise web.HTTPSeeOther(pages.link("run", next(iter(self._runs))))
        sort = request.query.get("sort", "-last change")
        states = await asyncio.to_thread(pages.states, self._runs, sort)
        varied = await asyncio.to_thread(tell_apart, self._runs)
        shown = {"states": states, "varied": varied, "sort": sort, "columns": pages.RUN_SORTS}
        return self._page("runs", {"folder": str(self._folder), **shown})

    async def _compare_page(self, request: web.Request) -> web.StreamResponse:
        a, b = (self._run(request.query.get(name, "")) for name in ("a", "b"))
        if missing := [run for run in (a, b) if not run.index.path.exists()]:
            return self._page("waiting", {"run": missing[0]})
        prompt = request.query.get("prompt")
        if prompt is None:
            return await asyncio.to_thread(lambda: self._page("compare", pages.compare(a, b)))
        return await asyncio.to_thread(lambda: self._page("answers", pages.answers(a, b, prompt)))

    async def _state(self, request: web.Request) -> web.StreamResponse:
        """What follow.js asks for, again and again."""
        run = self._run(request.match_info["run"])
        return web.json_response({"words": self._progress(run), **self._place(run)})

    async def _static_file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in STATIC:
            raise web.HTTPNotFound
        return web.Response(body=self._static[name], content_type=STATIC[name], charset="utf-8")

    def _rater(self, request: web.Request) -> Rater:
        name = ""
        with contextlib.suppress(ValueError):  # other servers of this machine may set it too
            name = parse_rater(unquote(request.cookies.get(RATER, "")))
        return Rater(name=name, settings=self._settings, seed=self._seed)

    def _run(self, name: str) -> ViewedRun:
        if name not in self._runs:
            raise NotThere(f"no run {name!r} here")
        self.indexer.watch(self._runs[name])
        return self._runs[name]

    def _progress(self, run: ViewedRun) -> str:
        """The state of the index in words."""
        progress = self.indexer.progress.get(run.name)
        problem = self.indexer.problems.get(run.name, "")
        unreadable = f"; {progress.unreadable} lines can't be read" if progress and progress.unreadable else ""
        share = f"index {progress.share:.0%}" if progress is not None else "index: waiting"
        return problem or f"{share}{unreadable}"

    def _place(self, run: ViewedRun) -> dict[str, int | bool]:
        """How many bytes are indexed, and whether these are all."""
        progress = self.indexer.progress.get(run.name)
        return {"done": progress.done if progress else 0, "whole": progress is not None and progress.share >= 1}

    def _page(self, name: str, values: Mapping[str, object], status: int = 200) -> web.Response:
        """The page of a template. With a `run` it says how far that one's index is."""
        run = values.get("run")
        known = {"progress": self._progress(run), **self._place(run)} if isinstance(run, ViewedRun) else {}
        shown = {"page": name, "run": None, "several": len(self._runs) > 1, **known, **values}
        text = self._environment.get_template(f"{name}.html.jinja").render(**shown)
        return web.Response(status=status, text=text, content_type="text/html", charset="utf-8")

    def _message(self, status: int, message: str, note: str = "") -> web.Response:
        return self._page("message", {"message": message, "note": note}, status=status)


# -- who may see the pages, and write by them: those on this machine who have the viewer's token -----------------------


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


# -- the thread that keeps the indexes up to date ----------------------------------------------------------------------


PAUSE_S = 2.0  # between two looks at the journals
SAY_EVERY_S = 5.0


class Indexer:
    """Follows runs from their first page on, one after the other."""

    def __init__(self) -> None:
        self.progress: dict[str, IndexProgress] = {}  # by the run's name
        self.problems: dict[str, str] = {}
        self._runs: dict[str, ViewedRun] = {}
        self._kept: dict[str, IndexProgress] = {}  # by the run's name: the state whose figures are in its index
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="viewer-index", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=10)

    def watch(self, run: ViewedRun) -> None:
        """Follow this run from now on."""
        if run.name not in self._runs:
            self._runs = {run.name: run, **self._runs}  # the newest first: someone waits for it
            self._wake.set()

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            for run in [*self._runs.values()]:
                try:
                    self._follow(run)
                    self.problems.pop(run.name, None)
                except (OSError, sqlite3.Error) as error:
                    self.problems[run.name] = f"the index can't be written: {error}"
                except Exception as error:  # other runs go on, and this one is tried again
                    problem = f"its index can't be made: {error!r}"
                    if self.problems.get(run.name) != problem:
                        log.error("%s: %s", run.name, problem, exc_info=True)
                    self.problems[run.name] = problem
            self._wake.wait(PAUSE_S)

    def _follow(self, run: ViewedRun) -> None:
        began = said = time.monotonic()
        first = None
        for progress in run.index.follow():
            self.progress[run.name] = progress
            first = first or progress
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                print(f"grmpipe: index of {run.name}: {progress.share:.0%}", file=sys.stderr, flush=True)
            if self._stopping.is_set():
                return
        if first == self.progress.get(run.name) is not None:  # nothing new: there is time for what the first page shows
            self._keep_figures(run)
        if said > began and first is not None:
            read_mb, took_s = (self.progress[run.name].done - first.done) / 1e6, time.monotonic() - began
            print(f"grmpipe: index of {run.name}: {read_mb:.0f} MB in {took_s:.1f} s", file=sys.stderr, flush=True)

    def _keep_figures(self, run: ViewedRun) -> None:
        state = run.index.progress()
        if self._kept.get(run.name) != state:
            keep_figures(run.index, state)
            self._kept[run.name] = state
