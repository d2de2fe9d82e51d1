"""The routes of the wires: a trainer's request -> what it asks -> the answer in its own form."""

import math
from collections.abc import Callable, Coroutine, Iterator

from aiohttp import web

from grmpipe.data.rows import parse_call
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.serve.access import read_client
from grmpipe.serve.held_groups import Call, HeldGroups
from grmpipe.serve.imputations import Imputations
from grmpipe.serve.wires.table import WIRES
from grmpipe.serve.wires.wire import Wire

SETTINGS = ("group_size", "timeout_s")  # of a URL
DAY_S = 86400.0


class WireRoutes:
    def __init__(self, held: HeldGroups, imputations: Imputations, longest_s: float) -> None:
        """longest_s: that a request is held of a client without a timeout of its own."""
        self._held = held
        self._imputations = imputations
        self._longest_s = longest_s

    def add_to(self, app: web.Application) -> None:
        for wire in WIRES.values():
            app.router.add_post(wire.path, self._make_handler(wire))

        async def end(app: web.Application) -> None:
            self._held.end()

        app.on_shutdown.append(end)

    def list_metrics(self) -> Iterator[str]:
        yield "# TYPE grmpipe_requests_held gauge"
        yield f"grmpipe_requests_held {self._held.in_flight}"
        yield "# TYPE grmpipe_responses_imputed_total counter"
        for cause, count in sorted(self._imputations.causes.items()):
            yield f'grmpipe_responses_imputed_total{{cause="{cause}"}} {count}'

    def _make_handler(self, wire: Wire) -> Callable[[web.Request], Coroutine[object, object, web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            call = self._read_call(wire, request)
            body = parse_call(await request.read(), wire.fields)
            asked = wire.read(body)
            async with raise_first_failure() as tasks:
                rewards = [tasks.create_task(self._held.ask(one, call)) for one in asked]
            return web.json_response(wire.write(body, [one.result() for one in rewards]))

        return answer

    def _read_call(self, wire: Wire, request: web.Request) -> Call:
        """Who asks, and the settings that stand in the URL. Raises ValueError."""
        if unknown := request.query.keys() - set(SETTINGS):
            raise ValueError(f"{min(unknown)}: unknown in this URL; known: {', '.join(SETTINGS)}")
        size, timeout = (request.query.get(name) for name in SETTINGS)
        if size is not None and not (size.isascii() and size.isdigit() and int(size[:9]) >= 1):
            raise ValueError(f"group_size: expected a whole number from 1 on, got {size!r}")
        client, known_s = read_client(request), wire.timeout_s or self._longest_s
        return Call(
            judge=request.match_info["judge"],
            client=client,
            sender=f"{client} {request.headers.get('Authorization', '')}",
            group_size=None if size is None else int(size[:9]),
            timeout_s=known_s if timeout is None else read_seconds(timeout),
            tries=wire.tries,
            gap_s=wire.gap_s,
        )


def read_seconds(text: str) -> float:
    """The client's own timeout, where it was changed."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= DAY_S:
        raise ValueError(f"timeout_s: expected seconds above 0 and at most {DAY_S:g}, got {text!r}")
    return seconds
