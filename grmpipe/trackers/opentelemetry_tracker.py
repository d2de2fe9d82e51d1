"""Spans of the timeline to a collector of OpenTelemetry: a trace for each step."""

import importlib.util
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grmpipe.trackers.tracker import TrackedRun, Tracker, TrackerConfig
from grmpipe.types import Metrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTER = "opentelemetry.exporter.otlp.proto.http"


@dataclass(frozen=True)
class OpenTelemetryConfig(TrackerConfig):
    """OpenTelemetry, over OTLP and HTTP. Its own variables set the exporter, OTEL_EXPORTER_OTLP_ENDPOINT above all."""

    library = "opentelemetry"

    def open(self, run: TrackedRun) -> Tracker:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # late: may not be installed

        return OpenTelemetryTracker(run, OTLPSpanExporter())

    def find_missing(self) -> str:
        for name in (self.library, "opentelemetry.sdk", EXPORTER):
            if not is_installed(name):
                return "type `pip install 'grmpipe[opentelemetry]'`"
        if any(os.environ.get(name) for name in ENDPOINTS):
            return ""
        return f"set {ENDPOINTS[0]} to your collector, for example http://localhost:4318"


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False


class OpenTelemetryTracker(Tracker):
    """A root span from one step's end to the next one's, with the step's metrics; those of the timeline that end
    meanwhile are its children. A thread of OpenTelemetry's sends them.
    """

    def __init__(self, run: TrackedRun, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "grmpipe"}
        self._provider = TracerProvider(
            resource=Resource.create({"grmpipe.run": run.name, **named}),
            span_limits=SpanLimits(max_span_attributes=1024),  # a step has more metrics than the default, 128
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("grmpipe")
        self._clock_began_ns = time.time_ns() - time.monotonic_ns()
        self._open_root()

    def _open_root(self) -> None:
        from opentelemetry.trace import set_span_in_context

        self._root = self._tracer.start_span("end of the run")  # unless a step follows
        self._context = set_span_in_context(self._root)

    def span(self, lane: str, name: str, start_s: float, end_s: float, args: Mapping[str, str | int | float]) -> None:
        began_ns, ended_ns = (self._clock_began_ns + round(at_s * 1e9) for at_s in (start_s, end_s))
        attributes = {"grmpipe.lane": lane, **{f"grmpipe.{key}": value for key, value in args.items()}}
        self._tracer.start_span(name, self._context, attributes=attributes, start_time=began_ns).end(ended_ns)

    def log(self, step: int, metrics: Metrics) -> None:
        self._root.update_name(f"step {step}")
        self._root.set_attributes({"grmpipe.step": step, **metrics})
        self._root.end()
        self._open_root()

    def alarm(self, text: str) -> None:
        self._root.add_event("alarm", {"text": text})

    def end(self, status: str, failure: str | None) -> None:
        from opentelemetry.trace import StatusCode

        self._root.set_attribute("grmpipe.status", status)
        if failure is not None:
            self._root.set_status(StatusCode.ERROR, failure)

    def close(self) -> None:
        self._root.end()
        self._provider.shutdown()
