"""A real OTLP exporter, and a collector of a few lines that speaks the protocol."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from command import Workplace
from observe.test_trace_ids import hop, recovery_events, step_of
from quorate.observe.event import Event
from quorate.observe.events import read_event
from quorate.observe.jsonl import JsonlSink
from quorate.observe.seldom_events import StepTraced
from quorate.observe.traces import run_identity, spans_of, trace_id
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER
from quorate.tracking.otlp import OtlpTracker
from quorate.tracking.tracker import Follower

pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("default")]

IN_A_RECOVERY = 5 + 2 + 2 * 2
"""Spans of the coordinator, of a way in, and of two steps."""


class Collector(rpc.TraceServiceServicer):  # type: ignore[misc]  # it has no types
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, OtlpSpan]] = []
        self._turn = threading.Lock()

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        with self._turn:
            for resource in request.resource_spans:
                about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                process = about["service.instance.id"]
                self.spans += [(process, span) for scope in resource.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()


@contextmanager
def serving(collector: Collector, port: int = 0) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    rpc.add_TraceServiceServicer_to_server(collector, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "traced")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    made = Workplace(tmp_path)
    yield made
    made.clean_up()


def write(run: RunFolder, *events: Event) -> None:
    sink = JsonlSink(run.events_file)
    for event in events:
        sink.handle(event)
    sink.close()


def follower(run: RunFolder, port: int) -> Follower:
    tracker = OtlpTracker(run, f"http://127.0.0.1:{port}", timeout=1.0)
    (run.path / FOLDER).mkdir(exist_ok=True)
    made = Follower(run, tracker)
    made.poll(always_begin=True)
    return made


def test_every_span_arrives_once_with_its_ids_and_times(run: RunFolder) -> None:
    collector, told = Collector(), [step_of(0, hop("send", 1)), step_of(1, hop("receive", 0, seconds=0.25))]
    write(run, *told)
    with serving(collector) as port:
        given = follower(run, port)
        given.poll(patiently=False)
        given.poll(patiently=False)
        given.close()
    expected = {span.span_id: span for event in told for span in spans_of(run_identity(run), event)}
    arrived = {span.span_id.hex(): (process, span) for process, span in collector.spans}
    assert Counter(span.span_id.hex() for _, span in collector.spans) == Counter(expected.keys())
    for own, span in expected.items():
        process, found = arrived[own]
        assert process == f"worker {span.worker}"
        assert (found.name, found.trace_id.hex()) == (span.name, span.trace_id)
        assert found.parent_span_id.hex() == (span.parent_id or "")
        assert abs(found.start_time_unix_nano / 1e9 - span.start) < 1e-5
        assert abs((found.end_time_unix_nano - found.start_time_unix_nano) / 1e9 - span.seconds) < 1e-5
        assert [link.span_id.hex() for link in found.links] == ([] if span.cause is None else [span.cause])
    assert {found.trace_id.hex() for _, found in arrived.values()} == {trace_id(run_identity(run), "1.1", 5)}
    (link,) = (link.span_id.hex() for _, found in arrived.values() for link in found.links)
    assert arrived[link][1].name == "send"


def test_a_recovery_arrives_with_the_coordinators_spans(run: RunFolder) -> None:
    collector = Collector()
    write(run, *recovery_events())
    with serving(collector) as port:
        given = follower(run, port)
        given.poll(patiently=False)
        given.close()
    names = [span.name for process, span in collector.spans if process == "coordinator"]
    assert names == ["recovery", "detect", "re-form", "copy", "first step"]
    ids = {span.span_id for _, span in collector.spans}
    orphans = {span.name for _, span in collector.spans if span.parent_span_id and span.parent_span_id not in ids}
    assert orphans == {"join"}, "only the first member's way in was not told"


def test_what_a_collector_has_missed_arrives_when_it_is_back(run: RunFolder) -> None:
    collector = Collector()
    with serving(collector) as port:
        given = follower(run, port)
        write(run, step_of(0, step=1))
        given.poll(patiently=False)
    before = len(collector.spans)
    assert before == 2
    write(run, *recovery_events())
    given.poll(patiently=False)
    given.poll(patiently=False)
    assert isinstance(given.trouble, ConnectionError)
    assert len(collector.spans) == before
    with serving(collector, port):
        while len(collector.spans) < before + IN_A_RECOVERY:  # ended by the test's time limit
            given.poll(patiently=False)
        given.close()
    counts = Counter(span.span_id for _, span in collector.spans)
    assert set(counts.values()) == {1}
    assert len(counts) == before + IN_A_RECOVERY


def test_one_that_goes_on_for_another_knows_of_the_recovery_that_had_begun(run: RunFolder) -> None:
    collector, told = Collector(), recovery_events()
    with serving(collector) as port:
        url = f"http://127.0.0.1:{port}"
        (run.path / FOLDER).mkdir()
        for part in (told[:3], told[3:]):
            write(run, *part)
            tracker = OtlpTracker(run, url)
            follower = Follower(run, tracker)
            assert follower.poll(always_begin=True)
            follower.close()
            with pytest.raises(ConnectionError):
                tracker.begin()
    assert len({span.span_id for _, span in collector.spans}) == len(collector.spans) == IN_A_RECOVERY


def test_a_job_exports_its_traces_by_one_key(place: Workplace) -> None:
    collector = Collector()
    with serving(collector) as port:
        trace = {"every": 4, "otlp": f"http://127.0.0.1:{port}"}
        place.write_job(workers=2, links="tcp", track={"trace": trace})
        done = place.train("--json")
        assert done.code == 0, done.stderr
    run = RunFolder(place.last)
    expected = Counter(
        span.span_id
        for line in run.events_file.read_text().splitlines()
        if isinstance(event := read_event(line), StepTraced)
        for span in spans_of(run_identity(run), event)
    )
    assert expected
    assert Counter(span.span_id.hex() for _, span in collector.spans) == expected


def test_a_collector_that_was_never_there_is_told_of_afterwards(place: Workplace) -> None:
    collector = Collector()
    with serving(collector) as port:
        pass  # a port on which nobody listens any more
    place.write_job(workers=2, track={"trace": {"every": 4, "otlp": f"http://127.0.0.1:{port}"}})
    done = place.train("--json")
    assert done.code == 0
    assert f"OTLP at http://127.0.0.1:{port} does not have all of the run" in done.stderr
    with serving(collector, port):
        caught_up = place.run("track", "last", "--json")
    assert caught_up.code == 0, caught_up.stderr
    assert {span.name for _, span in collector.spans} >= {"step", "join", "forward", "bucket"}
