"""The server of the viewer: on this machine only, and only for those who have its token.

GET /                    the runs of the folder, or the only one
GET /<page>/<run>?..     a page of a run, by its name: see PAGES
GET /compare?a=..&b=..   two runs; with a prompt, their answers to it
GET /state/<run>         how far its index is, as JSON
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sqlite3
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from grmpipe.viewer import pages
from grmpipe.viewer.access import make_guard
from grmpipe.viewer.indexer import Indexer
from grmpipe.viewer.runs import ViewedRun, check_readable, find_runs, tell_apart

LOOPBACK = "127.0.0.1"
PORT = 8707  # if it is free: a tunnel to it keeps working
STATIC = {"style.css": "text/css", "follow.js": "text/javascript"}


def view(folder: Path, port: int = PORT) -> None:
    """Serve the runs of a folder until a signal ends it. Raises ConfigError."""
    runs = find_runs(folder)
    check_readable(runs)
    asyncio.run(serve(Viewer(folder, runs), port))


async def serve(viewer: Viewer, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(viewer.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        taken = await listen(runner, port)
        print(f"grmpipe: http://{LOOPBACK}:{taken}/?token={viewer.token}", flush=True)
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

    def __init__(self, folder: Path, runs: Mapping[str, ViewedRun]) -> None:
        self.token = secrets.token_urlsafe(32)
        self.indexer = Indexer()
        self._folder = folder
        self._runs = dict(runs)
        self._environment = pages.make_environment()
        self._static = {name: (files("grmpipe.viewer") / "static" / name).read_bytes() for name in STATIC}
        if len(self._runs) == 1:
            self.indexer.watch(next(iter(self._runs.values())))

    def app(self) -> web.Application:
        app = web.Application(middlewares=[make_guard(self.token), self._explain])
        app.router.add_get("/", self._runs_page)
        app.router.add_get("/static/{name}", self._static_file)
        app.router.add_get("/compare", self._compare_page)
        app.router.add_get("/state/{run:.+}", self._state)
        app.router.add_get("/{page:" + "|".join(pages.PAGES) + "}/{run:.+}", self._run_page)
        return app

    @web.middleware
    async def _explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors of what the URL asks for, in words."""
        try:
            return await handler(request)
        except pages.NotThere as error:
            return self._message(404, str(error))
        except ValueError as error:  # of a query that was typed
            return self._message(400, str(error))
        except RecursionError:
            return self._message(400, "a file of this run is nested too deeply")
        except sqlite3.OperationalError:  # the index is being made, or made anew
            run = self._runs.get(request.match_info.get("run", ""))
            return self._page("waiting", {"run": run}, status=503)

    # -- pages ---------------------------------------------------------------------------------------------------------

    async def _run_page(self, request: web.Request) -> web.StreamResponse:
        run, page = self._run(request.match_info["run"]), request.match_info["page"]
        if not run.index.path.exists():
            return self._page("waiting", {"run": run})
        return await asyncio.to_thread(lambda: self._page(page, {"run": run, **pages.PAGES[page](run, request.query)}))

    async def _runs_page(self, request: web.Request) -> web.StreamResponse:
        self._runs = await asyncio.to_thread(find_runs, self._folder)
        if len(self._runs) == 1:
            raise web.HTTPSeeOther(pages.link("run", next(iter(self._runs))))
        states = await asyncio.to_thread(pages.states, self._runs)
        varied = await asyncio.to_thread(tell_apart, self._runs)
        return self._page("runs", {"folder": str(self._folder), "states": states, "varied": varied})

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

    def _run(self, name: str) -> ViewedRun:
        if name not in self._runs:
            raise pages.NotThere(f"no run {name!r} here")
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

    def _message(self, status: int, message: str) -> web.Response:
        return self._page("message", {"message": message}, status=status)
