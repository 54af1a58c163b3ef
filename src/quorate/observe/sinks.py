"""Who is given events: the sinks, and two ways of serving one.

`Guarded` serves it at once, and a failing one ends no job. `Queued` puts a queue before a live view that may be slow.
One that must be complete reads the file (`tracking.tracker.Follower`).
"""

import logging
import threading
from collections import deque
from enum import StrEnum
from typing import Protocol

from quorate.observe.event import Event, event
from quorate.observe.quantities import plural, visible

log = logging.getLogger(__name__)

MOST_QUEUED = 10_000


class Sink(Protocol):
    """Makes something of events: a console, a file, a service.

    The launcher gives it each event of a run, in order and on one thread, and closes it once when the run is over.
    """

    def handle(self, event: Event) -> None:
        """Take an event, of whatever kind."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class Guarded:
    """A sink that ends no job: what it raises is counted, and told once in the log."""

    def __init__(self, sink: Sink) -> None:
        self.failed = 0
        self._sink = sink

    def handle(self, event: Event) -> None:
        try:
            self._sink.handle(event)
        except Exception:
            self._count()

    def close(self) -> None:
        try:
            self._sink.close()
        except Exception:
            self._count()

    def _count(self) -> None:
        if not self.failed:
            log.exception("%s fails: what it should show is missing. Training continues.", type(self._sink).__name__)
        self.failed += 1


class Queued:
    """A sink behind a queue, for one that may take long: a thread of its own serves it, and whoever publishes waits for
    nothing.

    Where the queue is full the oldest events are dropped, since what is shown live is about now; `dropped` counts them.
    A sink that needs all events is served from the file instead. Not for the process that forks workers.
    """

    def __init__(self, sink: Sink, most: int = MOST_QUEUED, patience: float = 5.0) -> None:
        self.dropped = 0
        self._sink = Guarded(sink)
        self._most = most
        self._patience = patience
        self._events: deque[Event] = deque()
        self._news = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"sink {type(sink).__name__}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> int:
        return self._sink.failed

    def handle(self, event: Event) -> None:
        with self._news:
            if len(self._events) >= self._most:
                self._events.popleft()
                self.dropped += 1
            self._events.append(event)
            self._news.notify()

    def close(self) -> None:
        """Give the sink the rest, for as long as patience lasts; what it has not taken by then is dropped."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(self._patience)
        with self._news:
            self.dropped += len(self._events)
            self._events.clear()

    def _serve(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._events or self._closing)
                if not self._events:
                    break
                event = self._events.popleft()
            self._sink.handle(event)
        self._sink.close()


# --- events for whoever looks on while a job runs: they are shown, and never recorded

LONGEST_LINE = 1000
"""Characters of a line that are shown; the log has all."""


class Prints(StrEnum):
    """Whose prints are shown: of all processes and lanes, of the first lane and its worker, or of none."""

    ALL = "all"
    FIRST = "first"
    NONE = "none"


@event(kind="")
class Printed(Event):
    """Lines that the task has printed or logged in a process of the job, in order; before them so many were `left_out`.

    `is_first`: in the first lane, beside the lanes of the worker that hosts it, or where the task is imported for all.
    """

    process: str
    lines: tuple[str, ...]
    is_first: bool = False
    left_out: int = 0


@event(kind="")
class Round(Event):
    """The supervisor has looked after the job once more, as it does some 20 times a second.

    `doing` is what a job is busy with that has not begun. After the last round every process has ended.
    """

    doing: str = ""
    is_last: bool = False


def printed_lines(event: Printed, prints: Prints) -> list[str]:
    """What is shown of it, each line marked with the process that has printed it."""
    if prints is Prints.NONE or (prints is Prints.FIRST and not event.is_first):
        return []
    lines = [f"[{event.process}] {_short(line)}" for line in event.lines]
    if event.left_out:
        lines.insert(0, f"[{event.process}] ({plural(event.left_out, 'line')} before this: see `quorate logs`)")
    return lines


def _short(line: str) -> str:
    cut = f"{line[:LONGEST_LINE]} … ({len(line):,} characters)" if len(line) > LONGEST_LINE else line
    return visible(cut)
