"""Who is given events: the sinks, and the three ways of serving one.

`Guarded` serves it at once, and a failing one ends no job. `Queued` puts a queue before a live view that may be slow.
`Durable` reads the file for one that must be complete.
"""

import contextlib
import logging
import threading
from collections import deque
from pathlib import Path
from typing import Protocol, runtime_checkable

from quorate.observe.event import Event
from quorate.observe.jsonl import EventTail
from quorate.storage.atomic import write_atomically

log = logging.getLogger(__name__)

MOST_QUEUED = 10_000
_SAVED_EVERY = 1000


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


@runtime_checkable
class Batching(Protocol):
    """A sink that keeps what it is given until `flush`, and then sends it as one."""

    def handle(self, event: Event) -> None:
        """Take an event, and keep what is to be sent of it."""
        ...

    def flush(self) -> None:
        """All that was taken is safe when this returns. What raises is kept, and flushed again later."""
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
    A sink that needs all events is served from the file instead (`Durable`). Not for the process that forks workers.
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


class Durable:
    """Gives a sink that must be complete every event of a run's file, in order and at least once.

    It keeps in a file how far the sink has come, so that another process goes on there after a kill. What was handled
    after the last time that was written down is given again. An event for which the sink raises is given again by the
    next `poll`, and nothing after it before. A sink that is `Batching` has come as far as it was flushed: while that
    fails it is given no more.
    """

    def __init__(self, events_file: Path, sink: Sink | Batching, offset_file: Path) -> None:
        self.failed = 0
        self.trouble: Exception | None = None
        self._tail = EventTail(events_file)
        self._sink = sink
        self._offset_file = offset_file
        try:
            self._tail.offset = max(0, int(offset_file.read_text()))
        except (FileNotFoundError, ValueError):
            self._tail.offset = 0
        self.offset = self._tail.offset

    def rewind(self) -> None:
        """Give all of the file again, from its beginning."""
        write_atomically(self._offset_file, "0")
        self.offset = self._tail.offset = 0

    def poll(self) -> bool:
        """Give the sink what is new; whether it has all of it. Called now and then, by whoever is not in the way of
        training. Why it has not is told as `trouble`."""
        self.trouble = None
        if not self._advance():
            return False
        for handled, event in enumerate(self._tail):
            if handled % _SAVED_EVERY == 0 and not self._advance():
                return False
            try:
                self._sink.handle(event)
            except Exception as error:
                self._fail(error)
                break
        return self._advance() and self.trouble is None

    def close(self) -> None:
        """Give the sink the rest."""
        self.poll()
        self._sink.close()

    def _advance(self) -> bool:
        """Write down how far the sink has come, once that is safe; False if it is not."""
        if self._tail.offset == self.offset:
            return True
        if isinstance(self._sink, Batching):
            try:
                self._sink.flush()
            except Exception as error:
                self._fail(error)
                return False
        self.offset = self._tail.offset
        with contextlib.suppress(OSError):  # a full disk: after a restart more is given again
            write_atomically(self._offset_file, str(self.offset))
        return True

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            log.debug("%s fails, and is given the same event again", type(self._sink).__name__, exc_info=error)
        self.failed += 1
        self.trouble = error
