"""The latest metrics of a run, where Prometheus fetches them."""

import hmac
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from grmpipe.trackers.tracker import TrackedRun, Tracker, TrackerConfig
from grmpipe.types import Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
READ_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class PrometheusConfig(TrackerConfig):
    """A page in Prometheus' text format, GET /metrics, as long as the run goes."""

    host: str = "127.0.0.1"  # Address to listen at. Any other needs a token.
    port: int = 9464  # Port to listen at; each run on a machine needs its own.
    token_env: str = ""  # Variable with the token that Prometheus sends (`authorization.credentials`); empty: none.

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port: must be from 0 (any free one) to 65535, got {self.port}")
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.token_env:
            raise ValueError(
                f"host: {self.host} can be reached from other machines; name a variable with a token in "
                "tracking.prometheus.token_env"
            )

    def open(self, run: TrackedRun) -> Tracker:
        return PrometheusTracker(self, run)

    def find_missing(self) -> str:
        needs_token = self.token_env and not os.environ.get(self.token_env)
        return f"set the variable {self.token_env} (tracking.prometheus.token_env)" if needs_token else ""


class PrometheusTracker(Tracker):
    """A server in a thread of its own."""

    def __init__(self, config: PrometheusConfig, run: TrackedRun) -> None:
        """Raises OSError if the port is taken."""
        self._run = run.name
        self._step, self._metrics, self._alarms = 0, Metrics(), 0
        token = os.environ[config.token_env] if config.token_env else ""
        try:
            self._server = ThreadingHTTPServer((config.host, config.port), make_handler(self._page, token))
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror}: {config.host}:{config.port}; set tracking.prometheus.port"
            ) from error
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def log(self, step: int, metrics: Metrics) -> None:
        # A name that this step lacks keeps its value: evaluations come every so many steps.
        self._step, self._metrics = step, {**self._metrics, **metrics}

    def alarm(self, text: str) -> None:
        self._alarms += 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _page(self) -> str:
        return "\n".join(list_lines(self._run, self._step, self._metrics, self._alarms)) + "\n"


def list_lines(run: str, step: int, metrics: Metrics, alarms: int) -> Iterator[str]:
    """Prometheus' text format. A metric's name becomes a label: it may hold what names of Prometheus can't."""
    label = f'run="{escape_label(run)}"'
    yield "# TYPE grmpipe_step gauge"
    yield f"grmpipe_step{{{label}}} {step}"
    yield "# TYPE grmpipe_alarms_total counter"
    yield f"grmpipe_alarms_total{{{label}}} {alarms}"
    yield "# TYPE grmpipe_metric gauge"
    for name, value in sorted(metrics.items()):
        yield f'grmpipe_metric{{{label},name="{escape_label(name)}"}} {float(value):.10g}'


def escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def make_handler(page: Callable[[], str], token: str) -> type[BaseHTTPRequestHandler]:
    """The handler of GET /metrics; with a token, for those who send it as a bearer."""

    class Handler(BaseHTTPRequestHandler):
        timeout = READ_TIMEOUT_S  # of the connection: one that sends nothing is closed

        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").encode("utf-8", "replace")
            if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                self.send_error(401)
            elif self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
            else:
                body = page().encode("utf-8", "replace")
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the console belongs to the run."""

    return Handler
