"""The job's events, each written once."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quorate.coordinator.events import Action, DeclareGeneration, EndJob, RecordEvents, RelayStop
from quorate.coordinator.states import Recollection
from quorate.core.errors import ReplicasDiffer, is_kind_of
from quorate.core.failure import Failure
from quorate.observe import events
from quorate.observe.event import Event, record_in
from quorate.observe.jsonl import EventTail, JsonlSink, events_in

log = logging.getLogger(__name__)

# Every worker passes through these: a step that is redone is told again, and `run` at the start of every generation.
_TOLD_ONCE = frozenset(
    kind.KIND
    for kind in (
        events.RunBegan,
        events.StepCompleted,
        events.MemoryRanOut,
        events.EvaluationDone,
        events.CheckpointSaved,
        events.CheckpointFailed,
        events.CheckpointSkipped,
    )
)
ASKED_TO_END = (130, 143)
"""Exit codes of a job that somebody has ended, which is no error."""
_PAGE = 4096
_RECALLED = 4 * 2**20


class EventLog:
    """Writes what workers tell and what the coordinator decides to the run's `events.jsonl`."""

    def __init__(self, sink: JsonlSink) -> None:
        self._sink = sink
        # One bit a step: a set of ten million steps would take a gigabyte.
        self._told: dict[tuple[str, int], int] = {}
        # What a worker is not answered it tells again, word for word, to the next coordinator.
        self._written_before: frozenset[str] = frozenset()
        # Whether anybody was lost since the last generation was formed.
        self._has_lost = False

    @property
    def path(self) -> Path:
        return self._sink.path

    def recall(self, since: int) -> Recollection:
        """Know what a predecessor has written after this place of the file.

        What workers may tell again is no older than a lease, so the last part of a long file is enough.
        """
        path = self._sink.path
        tail = EventTail(path)
        tail.offset = max(since, (path.stat().st_size if path.exists() else 0) - _RECALLED)
        return self.take_up(tail.read_lines())

    def take_up(self, lines: Sequence[str]) -> Recollection:
        """Know what a predecessor has written."""
        told = events_in(lines)
        self._written_before = frozenset(lines)
        for event in told:
            if event.kind in _TOLD_ONCE:
                self._is_new(event.kind, event.step)
            elif isinstance(event, events.RolledBack) and event.step is not None:
                self._forget_after(event.step)
        backwards = told[::-1]
        end = next((event for event in backwards if isinstance(event, events.RunFinished | events.RunFailed)), None)
        resize = next((event for event in backwards if isinstance(event, events.Resized)), None)
        has_begun = any(isinstance(event, events.GenerationFormed) for event in told)
        # What says last whether the replicas of a generation are alike: one was formed, or was lost since they differ.
        says = (event for event in backwards if isinstance(event, events.GenerationFormed) or _differs(event))
        is_condemned = isinstance(next(says, None), events.WorkerLost)
        workers, servers = (None, None) if resize is None else (resize.workers, resize.servers)
        return Recollection(end, workers, has_begun, is_condemned, servers)

    def record(self, action: Action) -> None:
        """Write down what a coordinator does, as far as it is for others to know."""
        match action:
            case Event():
                self.publish(action)
            case RecordEvents(lines):
                self._publish_lines(lines)
            case DeclareGeneration(generation):
                members = (events.HostedLanes(one.worker, one.address, tuple(one.lanes)) for one in generation.workers)
                formed = events.GenerationFormed(
                    generation=str(generation.id),
                    lanes=generation.lanes,
                    members=tuple(members),
                    from_step=generation.cursor.step,
                    behind=tuple(generation.behind),
                    servers=tuple(server.worker for server in generation.servers) or None,
                    mesh=None if generation.mesh is None else str(generation.mesh),
                )
                self.publish(formed)
                self._has_lost = False
            case RelayStop(reason):
                self.publish(events.RunStopped(reason=reason))
            case EndJob(None, digest, result):
                self.publish(events.RunFinished(weights_digest=digest, result=dict(result)))
            case EndJob(Failure() as failure):
                self.publish(events.RunFailed.of(failure))

    def publish(self, event: Event) -> None:
        """Write an event of this moment, unless it has been told before."""
        self._has_lost = self._has_lost or isinstance(event, events.WorkerLost)
        if isinstance(event, events.RolledBack) and not self._forget_after(event.step or 0) and not self._has_lost:
            return  # all have saved and left: nothing is trained again
        if event.kind not in _TOLD_ONCE or self._is_new(event.kind, event.step):
            self._sink.handle(replace(event, time=time.time()))
            _log_trouble(event)

    def _publish_lines(self, lines: tuple[str, ...]) -> None:
        """Write the events that a worker tells, as they are: of most there is one a step, and nothing is to be known of
        them but whether they are new. A line that is no event is skipped: it must not stop the heartbeat."""
        for line in lines:
            try:
                record = record_in(line)
            except ValueError as error:
                log.warning("a worker sent something that is not an event (%r): %.200s", error, line)
                continue
            if record["kind"] in _TOLD_ONCE:
                is_new = self._is_new(record["kind"], record.get("step"))
            else:
                is_new = line not in self._written_before
            if is_new:
                self._sink.append(line)

    def close(self) -> None:
        self._sink.close()

    def _forget_after(self, step: int) -> bool:
        """Whether anything was told of later steps."""
        last, bit = divmod(step, _PAGE)
        later = [place for place in self._told if place[1] >= last]
        told = sum(self._told[place].bit_count() for place in later)
        for kind, page in later:
            kept = (2 << bit) - 1 if page == last else 0
            self._told[kind, page] &= kept
        return told > sum(self._told[place].bit_count() for place in later)

    def _is_new(self, kind: str, step: int | None) -> bool:
        page, bit = divmod(-1 if step is None else step, _PAGE)
        told = self._told.get((kind, page), 0)
        self._told[kind, page] = told | 1 << bit
        return not told >> bit & 1


def _log_trouble(event: Event) -> None:
    """Have in the log, as a warning or an error, what somebody looks for there: what was lost, and where that led to.
    Of what a worker tells, its own log has it."""
    match event:
        case events.WorkerLost():
            log.warning("%s", event.message or "a worker is lost")
        case events.RolledBack():
            log.warning("back to step %d: what follows it is trained again", event.step or 0)
        case events.CoordinatorReplaced():
            log.warning("another coordinator has taken over, and waits for %d processes", event.present or 0)
        case events.LogMessage() if event.level != "info":
            log.warning("%s", event.message)
        case events.RunFailed() if event.failure.exit_code not in ASKED_TO_END:
            log.error("%s", event.failure.message)


def _differs(event: Event) -> bool:
    return isinstance(event, events.WorkerLost) and (not event.cause or is_kind_of(event.cause, ReplicasDiffer))
