"""Traces in Chrome's format, which Perfetto and chrome://tracing show without any server.

Each worker, and the coordinator, is a process of its own. What it does one after another has a track: the training
thread with its lanes, the exchange with its buckets and what they receive, the sends, the saves. Arrows lead from a
frame that is sent to where it is received.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from quorate.core.generation import name_of
from quorate.core.spans import BUCKET, GATHER, RECEIVE, SAVE, SEND, STEP
from quorate.core.worker_status import EXCHANGE, JOIN
from quorate.history.traces import Trace
from quorate.observe.traces import COORDINATOR, RECOVERY, TracedSpan
from quorate.storage.atomic import write_atomically

_TRACKS = ("step", "exchange", "sends", "saves")
_COORDINATORS_PLACE = 1_000_000
"""The number of its process: those of workers are their own."""


def write_chrome_trace(file: Path, traces: Iterable[Trace]) -> None:
    """Write traces to a file, whole or not at all. Raises OSError."""
    write_atomically(file, json.dumps(chrome_document(traces), separators=(",", ":")))


def chrome_document(traces: Iterable[Trace]) -> dict[str, Any]:
    """The JSON object of a trace file. Times are microseconds from the beginning of the first trace."""
    events: list[dict[str, Any]] = []
    shown = list(traces)
    origin = min((span.start for trace in shown for span in trace.spans), default=0.0)
    seen: set[tuple[int, int]] = set()
    for trace in shown:
        for event in _events_of(trace, origin):
            if (track := (event["pid"], event["tid"])) not in seen:
                seen.add(track)
                events += _names(*track, is_new=sum(pid == track[0] for pid, _ in seen) == 1)
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events_of(trace: Trace, origin: float) -> Iterator[dict[str, Any]]:
    sent = {span.span_id for span in trace.spans if span.name == SEND}
    caused = {span.cause for span in trace.spans if span.cause in sent}
    by_id = {span.span_id: span for span in trace.spans}
    about = {"step": trace.step, "generation": trace.generation, "trace": trace.id}
    for span in trace.spans:
        place = {"pid": _process(span.worker), "tid": _track(span, by_id), "cat": "quorate"}
        start = (span.start - origin) * 1e6
        is_root = span.name in (STEP, JOIN, SAVE, RECOVERY)
        args = {**span.attributes, **(about if is_root else {}), "span": span.span_id}
        duration = max(span.seconds * 1e6, 0.001)
        yield {"ph": "X", "name": _label(span, trace), "ts": start, "dur": duration, **place, "args": args}
        arrow = {"name": "frame", **place}
        if span.span_id in caused:
            yield {"ph": "s", "id": span.span_id, "ts": start, **arrow}
        elif span.cause in sent:
            yield {"ph": "f", "bp": "e", "id": span.cause, "ts": start + duration, **arrow}


def _names(process: int, track: int, is_new: bool) -> list[dict[str, Any]]:
    def named(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process, "tid": tid, "args": args}

    names = [named("thread_name", track, name=_TRACKS[track]), named("thread_sort_index", track, sort_index=track)]
    if not is_new:
        return names
    is_worker = process != _COORDINATORS_PLACE
    name = name_of(process) if is_worker else "coordinator"
    order = process if is_worker else -1
    return [named("process_name", 0, name=name), named("process_sort_index", 0, sort_index=order), *names]


def _process(worker: int) -> int:
    return _COORDINATORS_PLACE if worker == COORDINATOR else worker


def _track(span: TracedSpan, by_id: dict[str, TracedSpan]) -> int:
    """Which track it is on: those on one must be inside one another, or apart."""
    if span.name == SEND:
        return _TRACKS.index("sends")
    if span.worker != COORDINATOR and span.name in (EXCHANGE, BUCKET):
        return _TRACKS.index("exchange")
    parent = None if span.parent_id is None else by_id.get(span.parent_id)
    if span.name == SAVE:
        return _TRACKS.index("saves")
    if parent is None or parent.worker != span.worker:
        return 0
    return _track(parent, by_id)


def _label(span: TracedSpan, trace: Trace) -> str:
    of = span.attributes
    if span.name == STEP:
        return f"{STEP} {trace.step}"
    if span.name == BUCKET:
        return f"{BUCKET} {of['bucket']}"
    if span.name in (SEND, RECEIVE):
        arrow = "→" if span.name == SEND else "←"
        what = f"chunk {of['chunk']} hop {of['hop']}" if "chunk" in of else f"notes of {of.get('of')}"
        return f"{span.name} {what} {arrow} {name_of(of.get('peer'))}"
    if span.name == GATHER:
        return GATHER
    return f"{span.name} lane {of['lane']}" if "lane" in of else span.name
