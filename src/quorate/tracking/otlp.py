"""Traces for a collector that speaks OTLP, such as Jaeger's or Grafana's: each span once, with our ids and times."""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags

from quorate.core.addresses import shown_place
from quorate.core.generation import name_of
from quorate.observe.event import Event
from quorate.observe.seldom_events import StepTraced
from quorate.observe.traces import COORDINATOR, RecoveryTracer, TracedSpan, run_identity, spans_of
from quorate.storage.run_folder import RunFolder
from quorate.tracking.tracker import Tracker

TIMEOUT = 5.0
"""Seconds that the collector has for a batch, until it counts as away."""


class OtlpTracker(Tracker):
    """A collector, as a tracker of the run: it is brought spans, and no points. It is told of no end."""

    key = "otlp"
    batch = 2000
    """Spans in one call, some hundred bytes each: a collector takes 4 MiB."""

    def __init__(self, run: RunFolder, url: str, timeout: float = TIMEOUT) -> None:
        super().__init__()
        self.name = f"OTLP at {shown_place(url)}"
        self._exporter = OTLPSpanExporter(endpoint=url, insecure=url.startswith("http://"), timeout=timeout)
        self._run = run.name
        self._identity = run_identity(run)
        self._recoveries = RecoveryTracer(self._identity)
        self._scope = InstrumentationScope("quorate")
        self._resources: dict[int, Resource] = {}
        self._last_traced = 0

    def begin(self) -> bool:
        """Raises where nobody answers. What was exported before is not exported again."""
        self._export([])
        return True

    def log(self, points: Sequence[TracedSpan]) -> int:
        self._export([self._readable(span) for span in points])
        return len(points)

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ConnectionError("the collector does not take spans")

    def close(self) -> None:
        self._exporter.shutdown()

    @property
    def _newest(self) -> int:
        return self._last_traced

    def _made(self, event: Event) -> Sequence[TracedSpan]:
        # A recovery may have begun before the place from which it goes on.
        spans = self._recoveries.handle(event)
        if isinstance(event, StepTraced) and event.spans:
            self._last_traced = max(self._last_traced, event.step or 0)
            spans += spans_of(self._identity, event)
        return spans

    def _readable(self, span: TracedSpan) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
            resource=self._resource(span.worker),
            attributes=dict(span.attributes),
            links=() if span.cause is None else (Link(_context(span.trace_id, span.cause)),),
            start_time=int(span.start * 1e9),
            end_time=int(span.end * 1e9),
            instrumentation_scope=self._scope,
        )

    def _resource(self, worker: int) -> Resource:
        if worker not in self._resources:
            process = "coordinator" if worker == COORDINATOR else f"{name_of(worker)}"
            about = {"service.name": "quorate", "service.instance.id": process, "quorate.run": self._run}
            self._resources[worker] = Resource(about)
        return self._resources[worker]


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
