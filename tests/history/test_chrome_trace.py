"""The file for Perfetto: complete events that nest on each track, and arrows that go forward in time."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from observe.test_trace_ids import MEMBERS, hop, recovery_events, step_of
from quorate.core.spans import ROOT, Span
from quorate.history.traces import chrome_document, traces_in
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed
from quorate.observe.jsonl import JsonlSink
from quorate.observe.seldom_events import StepTraced
from quorate.storage.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "traced")


def write(run: RunFolder, *events: Event) -> None:
    sink = JsonlSink(run.events_file)
    for event in events:
        sink.handle(event)
    sink.close()


def exported(run: RunFolder) -> list[dict[str, Any]]:
    """As another program reads it."""
    document: dict[str, Any] = json.loads(json.dumps(chrome_document(traces_in(run)), allow_nan=False))
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def overlapped_step(worker: int) -> StepTraced:
    """An exchange whose first bucket is summed while the lane still computes."""
    spans = (
        Span("step", 0.0, 1.0, ROOT, {}),
        Span("exchange", 0.3, 0.6, 0, {}),
        Span("compute", 0.1, 0.5, 0, {"lane": worker}),
        Span("forward", 0.1, 0.1, 2, {"lane": worker, "batch": 1}),
        Span("bucket", 0.3, 0.5, 1, {"bucket": 0, "bytes": 4}),
        Span("send", 0.35, 0.3, 4, {"bucket": 0, "chunk": worker, "hop": 1, "peer": 1 - worker}),
        Span("receive", 0.35, 0.4, 4, {"bucket": 0, "chunk": 1 - worker, "hop": 1, "peer": 1 - worker}),
        Span("apply", 0.9, 0.1, 0, {}),
    )
    return StepTraced(step=5, generation="1.1", worker=worker, began=1000.0, spans=spans)


def saved(worker: int) -> StepTraced:
    spans = (Span("save", 0.0, 9.0, ROOT, {}), Span("write", 1.0, 2.0, 0, {}))
    return StepTraced(step=5, generation="1.1", worker=worker, began=1000.8, spans=spans)


def test_what_is_on_one_track_is_inside_one_another_or_apart(run: RunFolder) -> None:
    write(run, overlapped_step(0), overlapped_step(1), saved(0), saved(1), *recovery_events()[1:])
    tracks = defaultdict(list)
    for event in exported(run):
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) > 6
    for spans in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 0.01:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.01
            open_until.append(end)


def test_each_worker_and_the_coordinator_is_a_process_with_its_tracks(run: RunFolder) -> None:
    write(
        run, GenerationFormed(generation="1.1", members=MEMBERS), overlapped_step(0), saved(0), *recovery_events()[1:]
    )
    names = [event for event in exported(run) if event["ph"] == "M"]
    processes = [event["args"]["name"] for event in names if event["name"] == "process_name"]
    assert sorted(processes) == ["coordinator", "worker 0", "worker 1"]
    tracks = {event["args"]["name"] for event in names if event["name"] == "thread_name" and event["pid"] == 0}
    assert tracks == {"step", "exchange", "sends", "saves"}


def test_lanes_buckets_and_hops_are_named(run: RunFolder) -> None:
    write(run, overlapped_step(0))
    labels = {event["name"] for event in exported(run) if event["ph"] == "X"}
    assert {"step 5", "compute lane 0", "forward lane 0", "bucket 0", "send chunk 0 hop 1 → worker 1"} <= labels


def test_an_arrow_leads_from_each_send_to_its_receive(run: RunFolder) -> None:
    write(run, overlapped_step(0), overlapped_step(1))
    arrows: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in exported(run):
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    assert len(arrows) == 2
    for ends in arrows.values():
        assert ends["s"]["pid"] != ends["f"]["pid"]
        assert ends["s"]["ts"] <= ends["f"]["ts"]


def test_a_send_whose_other_end_is_not_told_has_no_arrow(run: RunFolder) -> None:
    write(run, step_of(0, hop("send", 1)))
    assert not [event for event in exported(run) if event["ph"] in "sf"]


# --- which traces there are


def test_the_newest_traces_are_kept_with_what_is_told_later_of_them(run: RunFolder) -> None:
    write(run, *(step_of(0, step=step) for step in (1, 2, 3)))
    late = StepTraced(step=3, generation="1.1", worker=0, began=1.0, spans=(Span("save", 0.0, 1.0, ROOT, {}),))
    forgotten = StepTraced(step=1, generation="1.1", worker=0, began=1.0, spans=(Span("save", 0.0, 1.0, ROOT, {}),))
    write(run, late, forgotten)
    traces = traces_in(run, newest=2)
    assert [(trace.step, len(trace.told)) for trace in traces] == [(2, 1), (3, 2)]
    assert [trace.step for trace in traces_in(run, step=1)] == [1]
    assert len(traces_in(run)) == 3


def test_a_checkpoint_that_is_told_before_its_step_belongs_to_it(run: RunFolder) -> None:
    write(run, saved(0), overlapped_step(0))
    (trace,) = traces_in(run, newest=2)
    assert len(trace.told) == 2


def test_a_torn_line_costs_one_event(run: RunFolder) -> None:
    write(run, step_of(0, step=1))
    with run.events_file.open("a") as file:
        file.write('{"kind":"spans","ver\n')
    write(run, step_of(0, step=2))
    assert [trace.step for trace in traces_in(run)] == [1, 2]


def test_an_exchange_beside_the_work_is_not_waited_for(run: RunFolder) -> None:
    write(run, overlapped_step(0))
    (trace,) = traces_in(run)
    (worker,) = trace.workers
    assert worker.phases == pytest.approx({"compute": 0.5, "exchange": 0.3, "apply": 0.1})
    assert worker.rest == pytest.approx(0.1)
    assert worker.covered == pytest.approx(0.9)


def test_a_recovery_is_in_the_trace_of_the_first_step_after_it(run: RunFolder) -> None:
    write(run, *recovery_events())
    (trace,) = traces_in(run)
    assert (trace.step, trace.generation) == (8, "1.2")
    assert trace.recovery[0].name == "recovery"
