"""Events on their way to the coordinator, with a worker's heartbeats."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quorate.core.timing import Timing
from quorate.observe.event import Event

log = logging.getLogger(__name__)
# A message that is too large is refused for good, and would keep every heartbeat after it from being sent.
_BATCH_BYTES = 512 * 2**10
_EVENT_LIMIT = 4 * 2**20
MOST_KEPT = 10_000
Publish = Callable[[Event], None]


@dataclass(frozen=True)
class Batch:
    """What one heartbeat tells. Sent again under the same number until it is answered, so that it is told once."""

    sequence: int
    lines: tuple[str, ...]


class Outbox:
    """A queue of events. `publish` never waits; batches are taken by one thread at a time."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._left_over = ""  # the line of the event that did not fit into the last batch
        self._batch = Batch(0, ())
        self._answered = True
        # How many events were ever queued, and how many have arrived.
        self.queued = self.arrived = 0
        self._left_out = 0  # of the events of the batch; they count as arrived when those before them have
        # Whoever asks while a batch is taken must not find neither lines nor batch.
        self._taking = threading.Lock()

    def publish(self, event: Event) -> None:
        """Queue an event. It becomes JSON later, on the thread that sends it: training waits for this call."""
        self.queued += 1
        self._events.append(event)

    def next_batch(self) -> Batch:
        """What to tell next: what has not been answered yet, or the oldest that is queued."""
        with self._taking:
            if self._answered:
                self._batch = Batch(self._batch.sequence + 1, tuple(self._take()))
                self._answered = False
            return self._batch

    def _take(self) -> list[str]:
        lines: list[str] = []
        size = 0
        while (line := self._next_line()) is not None:
            if lines and size + len(line) > _BATCH_BYTES:
                self._left_over = line
                break
            lines.append(line)
            size += len(line)
        return lines

    def _next_line(self) -> str | None:
        if self._left_over:
            line, self._left_over = self._left_over, ""
            return line
        while self._events:
            event = self._events.popleft()
            try:
                line = event.to_json()
            except (TypeError, ValueError) as error:  # which must not end the heartbeats
                log.warning("an event of kind %s is left out: %s", event.kind, error)
            else:
                if len(line) <= _EVENT_LIMIT:
                    return line
                log.warning("an event of kind %s is left out: it has %d characters", event.kind, len(line))
            self._left_out += 1
        return None

    def answered(self) -> None:
        """The last batch has arrived."""
        if not self._answered:
            self.arrived += len(self._batch.lines) + self._left_out
            self._left_out = 0
        self._answered = True

    def is_empty(self) -> bool:
        """Whether everything has arrived."""
        with self._taking:
            return not self._events and not self._left_over and (self._answered or not self._batch.lines)


class Backlog:
    """What a worker's loop publishes: by the host of lane 0 at once, by everybody else if the one who hosts it dies.

    Events that were still on their way are lost with a worker, but every worker passes through the same steps, so
    another can tell them as well; the coordinator writes each down once. Whoever is quiet about an event keeps it for
    as long as it may be unknown.
    """

    def __init__(self, publish: Publish, timing: Timing) -> None:
        self._publish = publish
        # Nobody completes a step who has not been answered for a lease, so nothing untold is older than that.
        self._window = timing.lease + 2 * timing.heartbeat_every
        self._kept: deque[Event] = deque(maxlen=MOST_KEPT)

    def publish(self, event: Event) -> None:
        """Publish an event, after those that were kept: this worker hosts lane 0 now."""
        self.publish_kept()
        self._publish(event)

    def publish_kept(self) -> None:
        """Publish what was kept, in its order: those who copy the state of a worker that is ahead cannot."""
        while self._kept:
            self._publish(self._kept.popleft())

    def keep(self, event: Event) -> None:
        """Be quiet about an event that another tells."""
        self._kept.append(event)
        # By the newest, not by the clock: while a loss is being noticed nothing happens that could be told.
        while event.time - self._kept[0].time > self._window:
            self._kept.popleft()
