"""The traces of a run, read back from its events: which there are, where the time of a step went, and
the same in Chrome's format."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quorate.core.cached import cached_property
from quorate.core.generation import APPLY, CHECKPOINT, COMPUTE, DATA, EVALUATION, EXCHANGE, JOIN, name_of
from quorate.core.regular_file import opened_regular
from quorate.core.spans import BUCKET, GATHER, PUBLISH, RECEIVE, SAVE, SEND, STEP, Span, covered
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, WorkerLost, read_event
from quorate.observe.seldom_events import StepTraced
from quorate.observe.traces import (
    COORDINATOR,
    RECOVERY,
    RecoveryTracer,
    TracedSpan,
    corrected,
    run_identity,
    spans_of,
    trace_id,
)
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder

_PHASES = (DATA, COMPUTE, EXCHANGE, APPLY, PUBLISH, EVALUATION, CHECKPOINT)
_KINDS = tuple(f'{{"kind":"{kind.KIND}"'.encode() for kind in (StepTraced, WorkerLost, GenerationFormed))
"""How the lines begin that matter here: of a long run they are a few among very many, and all others are not parsed."""


@dataclass(frozen=True)
class WorkerTime:
    """Where a worker's time of a step went: seconds by phase. What an overlapped exchange does while the worker
    computes is not waited for, and does not count."""

    worker: int
    seconds: float
    phases: dict[str, float]
    covered: float
    clock_offset: float | None
    clock_uncertainty: float | None

    @property
    def rest(self) -> float:
        return max(0.0, self.seconds - sum(self.phases.values()))


@dataclass
class Trace:
    """A step of a generation, as its workers have traced it; with the recovery before it, if there was one."""

    run: str
    generation: str
    step: int
    told: list[StepTraced] = field(default_factory=list)
    recovery: list[TracedSpan] = field(default_factory=list)

    @property
    def id(self) -> str:
        return trace_id(self.run, self.generation, self.step)

    @cached_property
    def spans(self) -> list[TracedSpan]:
        """All of them on one time line."""
        return corrected([*self.recovery, *(span for event in self.told for span in spans_of(self.run, event))])

    @property
    def workers(self) -> list[WorkerTime]:
        steps = [event for event in self.told if event.spans[0].name == STEP]
        return [_time_of(event) for event in sorted(steps, key=lambda event: event.worker)]


def traces_in(run: RunFolder, step: int | None = None, newest: int | None = None) -> list[Trace]:
    """The traces of a run in their order: all, those of a step (trained in several generations), or the newest."""
    identity = run_identity(run)
    recoveries = RecoveryTracer(identity)
    found: dict[tuple[str, int], Trace] = {}
    gone: set[tuple[str, int]] = set()
    for event in _events(run):
        spans = recoveries.handle(event)
        if not isinstance(event, StepTraced) or not event.spans or (step is not None and event.step != step):
            continue
        key = event.generation, event.step or 0
        if key in gone:
            continue  # the checkpoint of a step that is not among the newest any more
        trace = found.setdefault(key, Trace(identity, *key))
        trace.told.append(event)
        trace.recovery += spans
        if newest is not None and len(found) > newest:
            oldest = next(iter(found))
            gone.add(oldest)
            del found[oldest]
    return list(found.values())


def _events(run: RunFolder) -> Iterator[Event]:
    try:
        with opened_regular(run.events_file) as file:
            for line in file:
                if line.startswith(_KINDS) and line.endswith(b"\n"):
                    try:
                        yield read_event(line)
                    except ValueError:
                        continue  # a crash has left half a line
    except FileNotFoundError:
        return


def _place_of(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


def _time_of(event: StepTraced) -> WorkerTime:
    root = event.spans[0]
    phases: defaultdict[str, float] = defaultdict(float)
    at_work = [span for span in event.spans if span.parent == 0 and span.name != EXCHANGE]
    for span in at_work:
        phases[span.name] += span.seconds
    for span in event.spans:
        if span.name == EXCHANGE:
            beside = Span(EXCHANGE, span.start, span.seconds, 0, {})
            phases[EXCHANGE] += span.seconds * (1.0 - covered((beside, *at_work)))
    return WorkerTime(
        event.worker,
        root.seconds,
        {name: phases[name] for name in sorted(phases, key=_place_of)},
        covered(event.spans),
        event.clock_offset,
        event.clock_uncertainty,
    )


_TRACKS = ("step", "exchange", "sends", "saves")
_COORDINATORS_PLACE = 1_000_000
"""The number of its process: those of workers are their own."""


def write_chrome_trace(file: Path, traces: Iterable[Trace]) -> None:
    """Write traces in Chrome's format, which Perfetto shows, whole or not at all. Raises OSError."""
    write_atomically(file, json.dumps(chrome_document(traces), separators=(",", ":")))


def chrome_document(traces: Iterable[Trace]) -> dict[str, Any]:
    """The JSON object of a trace file. Times are microseconds from the beginning of the first trace.

    Each worker, and the coordinator, is a process of its own. What it does one after another has a track: the training
    thread with its lanes, the exchange with its buckets and what they receive, the sends, the saves. Arrows lead from a
    frame that is sent to where it is received.
    """
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
        pid = _COORDINATORS_PLACE if span.worker == COORDINATOR else span.worker
        place = {"pid": pid, "tid": _track(span, by_id), "cat": "quorate"}
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
