"""The spans of all workers, and the coordinator's, as traces: what belongs together, and what caused what.

Ids are functions of run, generation, step and what a span is of. So the spans of one step are one trace, and those of
a frame that was sent and received are linked, although no worker knows of the others'.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quorate.core.generation import COPY, JOIN
from quorate.core.spans import RECEIVE, ROOT, SAVE, SEND, STEP, Span
from quorate.observe import events
from quorate.observe.event import Event
from quorate.observe.seldom_events import StepTraced
from quorate.storage.run_folder import RunFolder

COORDINATOR = -1
"""Whose spans those of a recovery are, in the place of a worker."""
RECOVERY, DETECT, REFORM, FIRST_STEP = "recovery", "detect", "re-form", "first step"

_NOT_ITS_NAME = ("peer", "bytes")


@dataclass(frozen=True)
class TracedSpan:
    """A span on the one time line, which is the coordinator's. `cause` is the span without which it could not end."""

    trace_id: str
    span_id: str
    parent_id: str | None
    worker: int
    name: str
    start: float
    seconds: float
    attributes: Mapping[str, Any] = field(default_factory=dict)
    cause: str | None = None

    @property
    def end(self) -> float:
        return self.start + self.seconds


def run_identity(run: RunFolder) -> str:
    """What tells a run from all others, also from one of the same name in another folder."""
    return f"{run.name} {run.created.isoformat()}"


def trace_id(run: str, generation: str, step: int) -> str:
    """Of a step: 16 bytes in hexadecimal digits, as OpenTelemetry has them."""
    return hashlib.blake2b(f"{run}\0{generation}\0{step}".encode(), digest_size=16).hexdigest()


def span_id(trace: str, worker: int, root: str, key: str) -> str:
    """Of a span, by what it is of: 8 bytes."""
    return hashlib.blake2b(f"{trace}\0{worker}\0{root}\0{key}".encode(), digest_size=8).hexdigest()


def spans_of(run: str, event: StepTraced) -> list[TracedSpan]:
    """The spans that a worker has told at once. `run` tells one run from all others.

    A checkpoint on its way is inside its worker's step; whatever else workers do is inside what the first one does.
    """
    trace = trace_id(run, event.generation, event.step or 0)
    root = event.spans[0].name
    keys = _keys(event.spans)
    ids = [span_id(trace, event.worker, root, key) for key in keys]
    made = []
    for span, key, own in zip(event.spans, keys, ids, strict=True):
        cause = None
        if span.name == RECEIVE:
            cause = span_id(trace, span.attributes["peer"], root, key.replace(RECEIVE, SEND, 1))
        parent = ids[span.parent] if span.parent != ROOT else _outside(trace, event, root)
        start = event.began + span.start
        made.append(
            TracedSpan(trace, own, parent, event.worker, span.name, start, span.seconds, dict(span.attributes), cause)
        )
    return made


def _outside(trace: str, event: StepTraced, root: str) -> str | None:
    if root == SAVE:
        return span_id(trace, event.worker, STEP, _key(STEP, 0))
    return None if event.worker == event.first else span_id(trace, event.first, root, _key(root, 0))


def _keys(spans: Sequence[Span]) -> list[str]:
    """What each span is of: its name and what tells it from others, and which of several that is."""
    seen: Counter[str] = Counter()
    keys = []
    for span in spans:
        own = [f"{name}={value}" for name, value in span.attributes.items() if name not in _NOT_ITS_NAME]
        label = " ".join([span.name, *own])
        keys.append(_key(label, seen[label]))
        seen[label] += 1
    return keys


def _key(label: str, occurrence: int) -> str:
    return f"{label} #{occurrence}"


class RecoveryTracer:
    """Follows a run's events: the coordinator's spans of each recovery, once it is over.

    They are in the trace of the first step that the new generation has completed, which all its workers trace.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._members: frozenset[int] = frozenset()
        self._losses: list[events.WorkerLost] = []
        self._mended: list[events.WorkerLost] = []
        self._formed: events.GenerationFormed | None = None
        self._copy: tuple[float, float] | None = None

    def handle(self, event: Event) -> list[TracedSpan]:
        match event:
            case events.WorkerLost(worker=int(worker)):
                # Nobody waits for one that was not at work yet.
                if not self._members or worker in self._members:
                    self._losses.append(event)
            case events.GenerationFormed():
                self._formed, self._members = event, event.workers
                self._mended, self._copy = list(self._losses), None
            case StepTraced() if self._is_of_recovery(event):
                return self._take(event)
        return []

    def _is_of_recovery(self, event: StepTraced) -> bool:
        formed = self._formed
        if formed is None or not self._mended or event.generation != formed.generation:
            return False
        return event.step == (formed.from_step or 0) + 1

    def _take(self, event: StepTraced) -> list[TracedSpan]:
        root = event.spans[0]
        if root.name == JOIN:
            for span in event.spans:
                if span.name == COPY and (self._copy is None or span.seconds > self._copy[1]):
                    self._copy = event.began + span.start, span.seconds
        if root.name != STEP:
            return []
        assert self._formed is not None, "it is of a recovery"
        losses, formed, end = self._mended, self._formed.time, event.began + root.start + root.seconds
        self._losses = [loss for loss in self._losses if loss not in losses]
        self._mended = []
        began = min(loss.time - (loss.detect_s or 0.0) for loss in losses)
        about = {"generation": event.generation, "workers": ", ".join(str(loss.worker) for loss in losses)}
        parts: list[tuple[str, float, float, dict[str, Any]]] = [
            (RECOVERY, began, end, {**about, "cause": " ".join(filter(None, (loss.message for loss in losses)))}),
            *((DETECT, loss.time - (loss.detect_s or 0.0), loss.time, {"of": loss.worker}) for loss in losses),
            (REFORM, max(loss.time for loss in losses), formed, about),
            *([] if self._copy is None else [(COPY, self._copy[0], sum(self._copy), {})]),
            (FIRST_STEP, formed, end, {"step": event.step}),
        ]
        trace = trace_id(self._run, event.generation, event.step or 0)
        spans = [Span(name, start, max(0.0, until - start), ROOT, about) for name, start, until, about in parts]
        ids = [span_id(trace, COORDINATOR, RECOVERY, key) for key in _keys(spans)]
        return [
            TracedSpan(trace, own, ids[0] if place else None, COORDINATOR, name, start, seconds, attributes)
            for place, (own, (name, start, seconds, _, attributes)) in enumerate(zip(ids, spans, strict=True))
        ]


# --- one time line


def corrected(spans: Iterable[TracedSpan]) -> list[TracedSpan]:
    """The spans of a trace with the workers' clocks moved by as little as it takes that no effect precedes its cause.

    What is known of a clock has an uncertainty, which may be longer than a frame takes. No frame was received before
    it was sent, which tells more: the least movement to earlier times that makes it so, and the least to later ones,
    are both right, and so is what lies between them.
    """
    spans = list(spans)
    limits = _limits(spans)
    workers = {span.worker for span in spans}
    earlier = _movements(workers, limits, -1.0)
    later = _movements(workers, [(to, from_, slack) for from_, to, slack in limits], 1.0)
    if earlier is None or later is None:
        return spans
    return [replace(span, start=span.start + (earlier[span.worker] + later[span.worker]) / 2) for span in spans]


def _limits(spans: Sequence[TracedSpan]) -> list[tuple[int, int, float]]:
    """(sender, receiver, by how much the sender may be later against the receiver), the least of each pair."""
    sent = {span.span_id: span for span in spans if span.name == SEND}
    least: dict[tuple[int, int], float] = {}
    for span in spans:
        if span.cause is not None and (cause := sent.get(span.cause)) is not None:
            pair = cause.worker, span.worker
            least[pair] = min(least.get(pair, float("inf")), span.end - cause.start)
    return [(*pair, slack) for pair, slack in least.items()]


def _movements(
    workers: Iterable[int], limits: Sequence[tuple[int, int, float]], direction: float
) -> dict[int, float] | None:
    """How far to move each clock in one direction; None where clocks cannot be moved so that it fits."""
    moved = dict.fromkeys(workers, 0.0)
    for _ in range(len(moved) + 1):
        is_done = True
        for mover, other, slack in limits:
            # In the first direction: moved[sender] <= moved[receiver] + slack; in the second the receiver moves.
            wanted = direction * moved[other] - slack
            if wanted > direction * moved[mover] + 1e-12:
                moved[mover] = direction * wanted
                is_done = False
        if is_done:
            return moved
    return None
