"""A judge behind HTTP.

POST /v1/judge           a row of task=score, as JSON -> a verdict or a failure for each of its responses
POST /v1/judges/<name>   the same by one judge, or one composition, of the configuration alone
POST /v1/judges/<name>/reload  {"path": ..} -> {"version": ..}: the judge's model is read from there, between two groups
GET  /v1/judges          which judges answer, and on which scales
GET  /health             ok; degraded: of the latest verdicts more failed than `judge.max_failure_rate` allows
GET  /metrics            counts and seconds, as Prometheus reads them
POST /<trainer>/<name>   as that trainer asks a reward model (wires/)
"""

import base64
import binascii
import difflib
import hmac
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from grmpipe.config.keys.entry_names import REWARD
from grmpipe.config.keys.user_code import format_value
from grmpipe.config.task_settings import ServeConfig
from grmpipe.data.prompts import FIELDS as PROMPT_FIELDS
from grmpipe.data.rows import Row, parse_call
from grmpipe.models.types import BudgetSpent
from grmpipe.observe.plain_json import json_bytes
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.observe.spending import Spending, list_prometheus_lines
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.serve.admission import Admission, Refused
from grmpipe.serve.call_log import CallLog, Imputations
from grmpipe.serve.held_groups import Call, HeldGroups, ServedJudges
from grmpipe.serve.open_calls import digest_question
from grmpipe.serve.wire import Wire
from grmpipe.serve.wires import WIRES
from grmpipe.types import Verdict

log = logging.getLogger(__name__)

WINDOW = 256  # latest responses, for the health
FIELDS = (*PROMPT_FIELDS, "response", "responses", "step")  # of a row; anything else is a column
MOST_MISSPELT = 100  # that are logged, whoever asks

Reload = Callable[[str, str], Awaitable[int]]  # name of a judge, path -> the new version
# Takes a row of task=score, the name of a judge or composition, and a priority (the lowest goes first).
AskByName = Callable[[Row, str, int], Awaitable[Sequence[JudgedSibling]]]


class JudgeService:
    """The routes, whom they admit, and what they count."""

    def __init__(
        self,
        serve: ServeConfig,
        judges: ServedJudges,
        ask: AskByName,
        call_log: CallLog,
        longest_s: float,
        spending: Spending | None = None,
        reload: Reload | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """longest_s: that a client waits who has no limit of its own. spending: at endpoints, for the metrics. reload:
        reads the model of a judge from another path; version: of all models that judge, now.
        """
        self._serve = serve
        self._judges = judges
        self._names = judges.names
        self._ask = ask
        self._call_log = call_log
        self._spending = spending
        self._reload, self._version = reload, version
        self._recent = deque[bool](maxlen=WINDOW)  # whether each of the latest responses failed
        self._admission = Admission(serve.max_in_flight)
        self._said_degraded = False
        self._said_misspelt = set[str]()
        self._judged, self._failed = 0, Counter[str]()
        self._requests, self._seconds = Counter[int](), 0.0
        held = HeldGroups(serve, judges, self.judge, lambda: self.is_degraded, call_log.imputations)
        self._wires = WireRoutes(held, call_log.imputations, longest_s)

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._serve.max_body_mb << 20,
            middlewares=[make_guard(self._serve.key), self._answer_errors],
        )
        app.router.add_post("/v1/judge", self._judge_row)
        app.router.add_post("/v1/judges/{judge}", self._judge_row)
        app.router.add_post("/v1/judges/{judge}/reload", self._reload_judge)
        app.router.add_get("/v1/judges", self._list_judges)
        app.router.add_get("/health", self._show_health)
        app.router.add_get("/metrics", self._show_metrics)
        self._wires.add_to(app)
        return app

    async def judge(self, row: Row, name: str, client: str) -> Sequence[JudgedSibling]:
        """The verdicts on the responses of a row, in their order. name: who judges: the reward of the configuration, or
        one of its judges and compositions. client: who asks. Raises Refused, and ValueError for a row that can't be
        judged.
        """
        if name not in self._names:
            raise Refused(404, f"there is no judge {name!r}; known: {', '.join(self._names)}")
        found, began_s, question = row.get("responses"), time.monotonic(), digest_question([name, row])
        known = self._call_log.find_answer(question, self._version())
        try:
            with self._admission.admit(client, len(found) if isinstance(found, list) else 1) as priority:
                judged = await self._ask(row, name, priority) if known is None else known
        except BudgetSpent as error:
            raise Refused(402, str(error)) from error
        finally:
            self._seconds += time.monotonic() - began_s
        self._call_log.record(
            judged, judge=name, client=client, step=row.get("step"), question=question,
            keep=self._judges.repeats(name, row), from_cache=known is not None, seconds=time.monotonic() - began_s,
        )  # fmt: skip
        for one in judged:
            self._judged += 1
            self._failed.update([one.failed] if one.failed else [])
            self._recent.append(bool(one.failed))
        self._say_whether_degraded(judged)
        return judged

    def _say_whether_degraded(self, judged: Sequence[JudgedSibling]) -> None:
        """Say once that too many fail, with the latest reason: what is trained on them has no reward."""
        failed = next((one for one in judged if one.failed), None)
        if self.is_degraded and failed is not None and not self._said_degraded:
            log.warning(
                "of the latest %d responses %d have no verdict; the last one: %s: %s",
                len(self._recent), sum(self._recent), failed.failed, failed.detail,
            )  # fmt: skip
        self._said_degraded = self.is_degraded

    @property
    def is_degraded(self) -> bool:
        """Whether of the latest responses more have no verdict than `judge.max_failure_rate` allows."""
        most = self._judges.max_failure_rate * len(self._recent)
        return len(self._recent) >= WINDOW // 4 and sum(self._recent) > most

    # -- routes --------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every end of a request as JSON: what is wrong with it, in words."""
        try:
            answer = await handler(request)
        except Refused as error:
            answer = refuse(error.status, str(error))
        except web.HTTPException as error:
            answer = refuse(error.status, error.reason, error.headers.get("Allow"))
        except ValueError as error:
            answer = refuse(400, str(error))
        except Exception:
            log.exception("a request failed")
            answer = refuse(500, "the service failed to judge this; its run.log says why")
        self._requests[answer.status] += 1
        return answer

    async def _judge_row(self, request: web.Request) -> web.StreamResponse:
        row = parse_call(await request.read(), "prompt or messages, and responses")
        warnings = self._warn_of_misspelt(row)
        judged = await self.judge(row, request.match_info.get("judge", REWARD), read_client(request))
        # Not json.dumps: a judge's text may hold half of a character.
        answer = {"verdicts": [describe(one) for one in judged]} | ({"warnings": warnings} if warnings else {})
        return web.Response(body=json_bytes(answer, strict=True), content_type="application/json")

    def _warn_of_misspelt(self, row: Row) -> list[str]:
        """What is said, in the answer and once in the log, of columns that look like misspelt fields. As in servers of
        OpenAI's interface an unknown field is no error: reward functions and templates read columns of any name.
        """
        found = dict(find_misspelt(row))
        for name in found.keys() - self._said_misspelt if len(self._said_misspelt) < MOST_MISSPELT else ():
            self._said_misspelt.add(name)
            log.warning("a request's %s", found[name])
        return list(found.values())

    async def _reload_judge(self, request: web.Request) -> web.StreamResponse:
        row = parse_call(await request.read(), "path")
        if not isinstance(path := row.get("path"), str) or not path or len(row) > 1:
            raise ValueError(f"path: expected a model's folder or hub name, and nothing else, got {format_value(row)}")
        if self._reload is None:
            raise Refused(404, "this service doesn't load other models")
        return web.json_response({"version": await self._reload(request.match_info["judge"], path)})

    async def _list_judges(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({**self._judges.describe(), "version": self._version()})

    async def _show_health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"status": "degraded" if self.is_degraded else "ok", "in_flight": self._admission.in_flight}
        )

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        lines = [
            "# TYPE grmpipe_responses_in_flight gauge", f"grmpipe_responses_in_flight {self._admission.in_flight}",
            "# TYPE grmpipe_responses_judged_total counter", f"grmpipe_responses_judged_total {self._judged}",
            "# TYPE grmpipe_responses_failed_total counter",
            *(f'grmpipe_responses_failed_total{{cause="{cause}"}} {n}' for cause, n in sorted(self._failed.items())),
            "# TYPE grmpipe_requests_total counter",
            *(f'grmpipe_requests_total{{status="{status}"}} {n}' for status, n in sorted(self._requests.items())),
            "# TYPE grmpipe_judging_seconds_total counter", f"grmpipe_judging_seconds_total {self._seconds:.6f}",
            *self._wires.list_metrics(),
            *(list_prometheus_lines(self._spending.figures) if self._spending is not None else ()),
        ]  # fmt: skip
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


def find_misspelt(row: Row) -> Iterator[tuple[str, str]]:
    """(column, what it may stand for, in words) of columns that are named almost like a field which the row lacks."""
    for name in row.keys() - set(FIELDS):
        if near := difflib.get_close_matches(name, set(FIELDS) - row.keys(), n=1, cutoff=0.8):
            yield name, f"field {format_value(name)} is taken as a column; is it {near[0]}?"


def describe(one: JudgedSibling) -> Mapping[str, object]:
    """A verdict as JSON: numbers, or null and why there are none."""
    verdict, critiques = one.report.verdict, list(one.critiques)
    found = {"reward": one.reward, "score": one.score, "critiques": critiques, **one.encode_criteria()}
    if not isinstance(verdict, Verdict):
        return found | {"failed": one.failed, "detail": one.detail}
    return found | {
        "score_std": verdict.score_std, "num_judgements": verdict.num_judgements, "version": verdict.grm_version
    }  # fmt: skip


# -- who may ask: those who have the key, or those of this machine -----------------------------------------------------


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


# -- the routes of the wires: a request of a trainer -> what it asks -> the answer in its own form ---------------------


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
