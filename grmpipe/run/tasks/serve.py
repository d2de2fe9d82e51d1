"""task=serve: the judge of a configuration behind HTTP, for trainers elsewhere.

POST /v1/judge    a row of task=score, as JSON -> a verdict or a failure for each of its responses
GET  /v1/judges   which judges answer, and on which scales
GET  /health      ok; degraded: of the latest verdicts more failed than `judge.max_failure_rate` allows
GET  /metrics     counts and seconds, as Prometheus reads them
"""

import asyncio
import base64
import binascii
import hmac
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from grmpipe.config.run_config import RunConfig
from grmpipe.data.rows import Findings, parse_json
from grmpipe.observe.plain_json import json_bytes
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.observe.summary import Status
from grmpipe.run.build.start import Running
from grmpipe.run.run_watcher import AskJudge
from grmpipe.run.signals import stop_by_signals
from grmpipe.run.tasks.score import CALL, ScoringRun
from grmpipe.types import Verdict

log = logging.getLogger(__name__)

LOCAL = ("127.0.0.1", "localhost", "[::1]")  # a page of another name may not ask, whatever address it resolves to
ENDS = "the service ends once what it judges is judged"
RETRY_S = "1"
WINDOW = 256  # latest responses, for the health


class ServingRun(ScoringRun):
    """Starts the judge, and serves it until a signal comes."""

    async def _work(self, running: Running) -> Status:
        service, ended = JudgeService(self._config, lambda row: self._judge_call(running, row)), asyncio.Event()
        serve = self._config.serve
        runner = web.AppRunner(service.app(), access_log=None, shutdown_timeout=self._config.rollout.group_deadline_s)
        with stop_by_signals(ended.set, ENDS):
            await runner.setup()
            try:
                await web.TCPSite(runner, serve.host, serve.port).start()
                host, port = runner.addresses[0][:2]
                print(f"grmpipe: http://{host}:{port}/v1/judge judges; Ctrl-C ends it", flush=True)
                await ended.wait()
            finally:
                await runner.cleanup()  # closes the door, then waits for what is being judged
        return "completed"


class JudgeService:
    """The routes, and what they count."""

    def __init__(self, config: RunConfig, judge: AskJudge) -> None:
        self._config = config
        self._judge = judge
        self._recent = deque[bool](maxlen=WINDOW)  # whether each of the latest responses failed
        self._in_flight = 0  # responses
        self._judged, self._failed = 0, Counter[str]()
        self._requests, self._seconds = Counter[int](), 0.0

    def app(self) -> web.Application:
        serve = self._config.serve
        app = web.Application(
            client_max_size=serve.max_body_mb << 20, middlewares=[make_guard(serve.key), self._answer_errors]
        )
        app.router.add_post("/v1/judge", self._judge_row)
        app.router.add_get("/v1/judges", self._list_judges)
        app.router.add_get("/health", self._show_health)
        app.router.add_get("/metrics", self._show_metrics)
        return app

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every end of a request as JSON: what is wrong with it, in words."""
        try:
            answer = await handler(request)
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
        row = parse_json(await request.read(), "judge", Findings(CALL))
        if not isinstance(row, dict):
            raise ValueError("judge: expected a JSON object with prompt or messages, and responses")
        found = row.get("responses")
        size = len(found) if isinstance(found, list) else 1
        if self._in_flight + size > (most := self._config.serve.max_in_flight):
            return refuse(429, f"{self._in_flight} responses are being judged; serve.max_in_flight={most}: ask again")
        self._in_flight += size
        began_s = time.monotonic()
        try:
            judged = await self._judge(row)
        finally:
            self._in_flight -= size
            self._seconds += time.monotonic() - began_s
        for one in judged:
            self._judged += 1
            self._failed.update([one.failed] if one.failed else [])
            self._recent.append(bool(one.failed))
        # Not json.dumps: a judge's text may hold half of a character.
        body = json_bytes({"verdicts": [describe(one) for one in judged]}, strict=True)
        return web.Response(body=body, content_type="application/json")

    async def _list_judges(self, request: web.Request) -> web.StreamResponse:
        config = self._config
        judges = {
            name: {"kind": judge.kind, "model": judge.model, "scale": [judge.scale.low, judge.scale.high]}
            for name, judge in config.judging.judges.items()
        }
        return web.json_response({"judges": judges, "reward": config.rewards.reward.kind})

    async def _show_health(self, request: web.Request) -> web.StreamResponse:
        most = self._config.main_judge.max_failure_rate * len(self._recent)
        is_degraded = len(self._recent) >= WINDOW // 4 and sum(self._recent) > most
        return web.json_response({"status": "degraded" if is_degraded else "ok", "in_flight": self._in_flight})

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        lines = [
            "# TYPE grmpipe_responses_in_flight gauge", f"grmpipe_responses_in_flight {self._in_flight}",
            "# TYPE grmpipe_responses_judged_total counter", f"grmpipe_responses_judged_total {self._judged}",
            "# TYPE grmpipe_responses_failed_total counter",
            *(f'grmpipe_responses_failed_total{{cause="{cause}"}} {n}' for cause, n in sorted(self._failed.items())),
            "# TYPE grmpipe_requests_total counter",
            *(f'grmpipe_requests_total{{status="{status}"}} {n}' for status, n in sorted(self._requests.items())),
            "# TYPE grmpipe_judging_seconds_total counter", f"grmpipe_judging_seconds_total {self._seconds:.6f}",
        ]  # fmt: skip
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


def describe(one: JudgedSibling) -> dict[str, object]:
    """A verdict as JSON: numbers, or null and why there are none."""
    verdict, critiques = one.report.verdict, list(one.critiques)
    found: dict[str, object] = {"reward": one.reward, "score": one.score, "critiques": critiques}
    if not isinstance(verdict, Verdict):
        return found | {"failed": one.failed, "detail": one.detail}
    return found | {
        "score_std": verdict.score_std, "num_judgements": verdict.num_judgements, "version": verdict.grm_version
    }  # fmt: skip


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
            if not hmac.compare_digest(read_key(request.headers).encode("utf-8", "replace"), key.encode()):
                return refuse(401, "the key is missing or wrong; send the header Authorization: Bearer <key>")
        elif not key and request.host.rsplit(":", 1)[0] not in LOCAL:
            return refuse(403, "without serve.key_env only this machine is answered, under 127.0.0.1 or localhost")
        return await handler(request)

    return guard


def read_key(headers: Mapping[str, str]) -> str:
    kind, _, given = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return given if kind.lower() == "bearer" else ""
