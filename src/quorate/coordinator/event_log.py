"""The job's events, each written once."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.core.errors import ReplicasDiffer
from quorate.core.failure import Failure
from quorate.core.generation import Generation
from quorate.observe.event import Event, record_in
from quorate.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSkipped,
    CoordinatorReplaced,
    EvaluationDone,
    GenerationFormed,
    HostedLanes,
    LogMessage,
    Resized,
    RolledBack,
    RunBegan,
    RunFailed,
    RunFinished,
    RunStopped,
    StepCompleted,
    WorkerLost,
)
from quorate.observe.jsonl import EventTail, JsonlSink

log = logging.getLogger(__name__)

# Every worker passes through these: a step that is redone is told again, and `run` at the start of every generation.
_TOLD_ONCE = frozenset(
    kind.KIND
    for kind in (RunBegan, StepCompleted, EvaluationDone, CheckpointSaved, CheckpointFailed, CheckpointSkipped)
)
_PAGE = 4096
_RECALLED = 4 * 2**20


@dataclass(frozen=True)
class Recollection:
    """How a job has ended, if it has; how many workers it was to have, if that was changed; whether it has begun, and
    whether the replicas of its last generation differed."""

    end: RunFinished | RunFailed | None
    workers: int | None
    has_begun: bool
    is_condemned: bool = False


class EventLog:
    """Writes what workers tell and what the coordinator decides to the run's `events.jsonl`."""

    def __init__(self, sink: JsonlSink) -> None:
        self._sink = sink
        # One bit a step: a set of ten million steps would take a gigabyte.
        self._told: dict[tuple[str, int], int] = {}

    @property
    def path(self) -> Path:
        """Its file."""
        return self._sink.path

    def recall(self, since: int) -> Recollection:
        """Know what a predecessor has written after this place of the file.

        What workers may tell again is no older than a lease, so the last part of a long file is enough.
        """
        tail = EventTail(self._sink.path)
        tail.offset = max(since, _size(self._sink.path) - _RECALLED)
        events = tail.read_new()
        for event in events:
            if event.kind in _TOLD_ONCE:
                self._is_new(event.kind, event.step)
            elif isinstance(event, RolledBack) and event.step is not None:
                self._forget_after(event.step)
        backwards = events[::-1]
        end = next((event for event in backwards if isinstance(event, RunFinished | RunFailed)), None)
        resize = next((event for event in backwards if isinstance(event, Resized)), None)
        has_begun = any(isinstance(event, GenerationFormed) for event in events)
        last = next((event for event in backwards if _tells_of_replicas(event)), None)
        is_condemned = isinstance(last, WorkerLost)
        return Recollection(end, None if resize is None else resize.workers, has_begun, is_condemned)

    def publish_lines(self, lines: tuple[str, ...]) -> None:
        """Write the events that a worker tells, as they are: of most there is one a step, and nothing is to be known of
        them but whether they are new. A line that is no event is skipped: it must not stop the heartbeat."""
        for line in lines:
            try:
                record = record_in(line)
            except ValueError as error:
                log.warning("a worker told something that is no event (%r): %.200s", error, line)
                continue
            if record["kind"] not in _TOLD_ONCE or self._is_new(record["kind"], record.get("step")):
                self._sink.append(line)

    def publish(self, event: Event) -> None:
        """Write an event, unless it has been told before."""
        if event.kind not in _TOLD_ONCE or self._is_new(event.kind, event.step):
            self._sink.handle(event)

    def generation_formed(self, generation: Generation) -> None:
        """Who hosts which lanes from now on."""
        event = GenerationFormed(
            generation=str(generation.id),
            lanes=generation.lanes,
            members=tuple(HostedLanes(each.worker, each.address, tuple(each.lanes)) for each in generation.members),
            from_step=generation.cursor.step,
            behind=tuple(generation.behind),
        )
        self.publish(event)

    def worker_lost(self, failure: Failure, detect: float) -> None:
        """A worker is gone, and the job goes on."""
        event = WorkerLost(
            step=failure.step,
            worker=failure.worker,
            cause=failure.kind,
            message=failure.message,
            phase=failure.phase,
            detect_s=round(detect, 4),
        )
        self.publish(event)

    def rolled_back(self, step: int) -> None:
        """The job goes back to a step: what was told of later ones was wrong, and the next telling counts."""
        self._forget_after(step)
        self.publish(RolledBack(step=step))

    def warning(self, message: str, step: int | None = None) -> None:
        """Something that somebody may want to look at."""
        self.publish(LogMessage(step=step, level="warning", message=message))

    def notice(self, message: str, step: int | None = None) -> None:
        """Something that is good to know."""
        self.publish(LogMessage(step=step, level="info", message=message))

    def resized(self, before: int, workers: int) -> None:
        """Somebody wants another number of workers."""
        self.publish(Resized(before=before, workers=workers))

    def stop_requested(self, reason: str) -> None:
        """Somebody stopped the job."""
        self.publish(RunStopped(reason=reason))

    def job_failed(self, failure: Failure) -> None:
        """Why the job ended."""
        self.publish(RunFailed.of(failure))

    def job_finished(self, digest: str, result: dict[str, Any]) -> None:
        """The job is complete."""
        self.publish(RunFinished(weights_digest=digest, result=result))

    def coordinator_replaced(self, incarnation: int, present: int) -> None:
        """Another coordinator has taken over, and waits for those who are there to come back to it."""
        self.publish(CoordinatorReplaced(incarnation=incarnation, present=present))

    def close(self) -> None:
        """Write no more."""
        self._sink.close()

    def _forget_after(self, step: int) -> None:
        last, bit = divmod(step, _PAGE)
        for kind, page in [place for place in self._told if place[1] >= last]:
            kept = (2 << bit) - 1 if page == last else 0
            self._told[kind, page] &= kept

    def _is_new(self, kind: str, step: int | None) -> bool:
        page, bit = divmod(-1 if step is None else step, _PAGE)
        told = self._told.get((kind, page), 0)
        self._told[kind, page] = told | 1 << bit
        return not told >> bit & 1


def _tells_of_replicas(event: Event) -> bool:
    """Whether it says if the replicas of a generation are alike: one was formed, or was lost since they differ."""
    is_condemned = isinstance(event, WorkerLost) and event.cause in ("", ReplicasDiffer.__name__)
    return is_condemned or isinstance(event, GenerationFormed)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
