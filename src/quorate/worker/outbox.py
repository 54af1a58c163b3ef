"""Events on their way to the coordinator."""

import logging
import threading
from collections import deque
from dataclasses import dataclass

from quorate.observe.event import Event

log = logging.getLogger(__name__)

# A message that is too large is refused for good, and would keep every heartbeat after it from being sent.
_BATCH_BYTES = 512 * 2**10
_EVENT_LIMIT = 4 * 2**20


@dataclass(frozen=True)
class Batch:
    """What one heartbeat tells. Sent again under the same number until it is answered, so that it is told once."""

    sequence: int
    lines: tuple[str, ...]


class Outbox:
    """A queue of events. `put` never waits; batches are taken by one thread at a time."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._left_over = ""  # the line of the event that did not fit into the last batch
        self._batch = Batch(0, ())
        self._answered = True
        # How many events were ever queued, and how many have arrived.
        self.queued = self.arrived = 0
        # Whoever asks while a batch is taken must not find neither lines nor batch.
        self._taking = threading.Lock()

    def put(self, event: Event) -> None:
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
            self.arrived += 1
        return None

    def answered(self) -> None:
        """The last batch has arrived."""
        if not self._answered:
            self.arrived += len(self._batch.lines)
        self._answered = True

    def is_empty(self) -> bool:
        """Whether everything has arrived."""
        with self._taking:
            return not self._events and not self._left_over and (self._answered or not self._batch.lines)
