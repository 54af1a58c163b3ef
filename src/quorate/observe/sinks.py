"""Who is given events: the sinks, and what keeps a slow or failing one away from whoever publishes."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from quorate.observe.event import Event

log = logging.getLogger(__name__)

MOST_QUEUED = 10_000


class Sink(Protocol):
    """Makes something of events: a console, a file, a service. The launcher gives it each event, in order, on one
    thread, and closes it once when the run is over. It should not raise: what cannot be shown ends no job."""

    def handle(self, event: Event) -> None:
        """Take an event."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class Queued:
    """A sink behind a queue, for one that may take long: it is served by a thread of its own, and whoever publishes
    waits for nothing and sees none of its errors.

    Where the queue is full the oldest events are dropped, since what is shown live is about now. `dropped` counts them,
    `failed` those that the sink raised for. A sink that needs all events reads them from the file (`Follower`).
    """

    def __init__(self, sink: Sink, most: int = MOST_QUEUED, patience: float = 5.0) -> None:
        self.dropped = self.failed = 0
        self._sink = sink
        self._most = most
        self._patience = patience
        self._events: deque[Event] = deque()
        self._news = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"sink {type(sink).__name__}", daemon=True)
        self._thread.start()

    def handle(self, event: Event) -> None:
        """Queue an event."""
        with self._news:
            if self._closing:
                return
            if len(self._events) >= self._most:
                self._events.popleft()
                self.dropped += 1
            self._events.append(event)
            self._news.notify()

    def close(self) -> None:
        """Give the sink the rest, for as long as patience lasts; what it does not take by then is dropped."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(self._patience)
        with self._news:
            self.dropped += len(self._events)
            self._events.clear()

    def _serve(self) -> None:
        while (event := self._next()) is not None:
            self._attempt(partial(self._sink.handle, event))
        self._attempt(self._sink.close)

    def _next(self) -> Event | None:
        with self._news:
            self._news.wait_for(lambda: self._events or self._closing)
            return self._events.popleft() if self._events else None

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            if not self.failed:
                log.exception("%s fails; training goes on, and what it should show is missing", self._thread.name)
            self.failed += 1
