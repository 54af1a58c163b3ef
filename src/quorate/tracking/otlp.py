"""Traces for a collector that speaks OTLP, such as Jaeger's or Grafana's: each span once, with our ids and times."""

from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags

from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, StepTraced, WorkerLost
from quorate.observe.traces import COORDINATOR, RecoveryTracer, TracedSpan, run_identity, spans_of
from quorate.storage.run_folder import RunFolder

TIMEOUT = 5.0
"""Seconds that the collector has for the spans of an event, until it counts as away."""


class OtlpSink:
    """Exports what events tell of traces. Raises where the collector is away, to be given the same event again."""

    def __init__(self, run: RunFolder, url: str, timeout: float = TIMEOUT) -> None:
        self._run = run.name
        self._identity = run_identity(run)
        self._recoveries = RecoveryTracer(self._identity)
        self._exporter = OTLPSpanExporter(endpoint=url, insecure=url.startswith("http://"), timeout=timeout)
        self._scope = InstrumentationScope("quorate")
        self._resources: dict[int, Resource] = {}
        self._unsent: tuple[Event, list[TracedSpan]] | None = None

    def handle(self, event: Event) -> None:
        if not isinstance(event, StepTraced | WorkerLost | GenerationFormed):
            return
        # One that comes again because the collector was away must not be followed twice.
        if self._unsent is None or self._unsent[0] != event:
            spans = self._recoveries.handle(event)
            if isinstance(event, StepTraced) and event.spans:
                spans += spans_of(self._identity, event)
            self._unsent = event, spans
        self._export(self._unsent[1])
        self._unsent = None

    def close(self) -> None:
        self._exporter.shutdown()

    def _export(self, spans: list[TracedSpan]) -> None:
        if spans and self._exporter.export(self._readable(spans)) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"the OTLP collector did not take {len(spans)} spans")

    def _readable(self, spans: Iterable[TracedSpan]) -> list[ReadableSpan]:
        return [
            ReadableSpan(
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
            for span in spans
        ]

    def _resource(self, worker: int) -> Resource:
        if worker not in self._resources:
            process = "coordinator" if worker == COORDINATOR else f"worker {worker}"
            about = {
                "service.name": "quorate",
                "service.instance.id": process,
                "quorate.run": self._run,
            }
            self._resources[worker] = Resource(about)
        return self._resources[worker]


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
