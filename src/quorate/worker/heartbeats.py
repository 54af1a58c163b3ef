"""What a worker's heartbeats carry (its events, and how fast it is) and what they bring it: its lease."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quorate.core.generation import APPLY, COMPUTE, DATA, Pace
from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.observe.events import EvaluationDone

log = logging.getLogger(__name__)
# A message that is too large is refused for good, and would keep every heartbeat after it from being sent.
_BATCH_BYTES = 512 * 2**10
_EVENT_LIMIT = 4 * 2**20
MOST_KEPT = 10_000


class Lease:
    """A permission that ends by itself. It counts from the *sending* of the call that renewed it."""

    def __init__(self, timing: Timing, now: Callable[[], float]) -> None:
        self._timing = timing
        self._now = now
        self._answered = now()
        self._until = self._answered
        self._refused: float | None = None
        self._ended = False

    def renew(self, sent: float, seconds: float) -> None:
        """By an answer to what was sent then; of 0 seconds where it is not granted."""
        if seconds > 0:
            self._answered = max(self._answered, sent)
            self._until = max(self._until, sent + seconds)
            self._refused = None
        elif self._refused is None:
            self._refused = self._now()

    def unanswered(self) -> None:
        """A call was: whoever refused before may be gone, and what it said with it."""
        self._refused = None

    def end(self) -> None:
        """The job is over: nothing may be done in its name any more, whatever answer is still on its way."""
        self._ended = True

    def remaining(self) -> float:
        """Seconds that are left; not positive when it is over."""
        return 0.0 if self._ended else self._until - self._now()

    def hope(self, patience: float) -> float:
        """Seconds for which it is of use to wait for the next, after this one has ended; not positive when it is not.

        A coordinator that is silent may be started again, for which it has `patience` seconds. One that answers, and
        grants none, has somebody else in this worker's place.
        """
        if self._ended:
            return patience
        timeout = self._timing.failure_timeout
        until = self._until + max(patience, timeout)
        if self._refused is not None:
            until = min(until, max(self._until, self._refused) + timeout)
        return until - self._now()

    def explain_giving_up(self, address: str, patience: float) -> str:
        silence = f"{self._now() - self._answered:.1f} s"
        if self._refused is not None:
            return f"the coordinator at {address} has granted no lease for {silence}: this worker was replaced"
        return (
            f"this worker gives up: the coordinator at {address} has not answered for {silence}, and none was started"
            f" in its place within {patience:.0f} s"
        )

    def explain(self, address: str) -> str:
        return (
            f"the coordinator at {address} has not answered for {self._now() - self._answered:.1f} s, longer than the"
            f" lease of {self._timing.lease:.1f} s (failure_timeout: {self._timing.failure_timeout}); this worker"
            " stops, since its lanes may be somebody else's by now"
        )


@dataclass(frozen=True)
class Batch:
    """What one heartbeat tells. Sent again under the same number until it is answered, so that it is told once."""

    sequence: int
    lines: tuple[str, ...]


class Outbox:
    """A queue of events. `publish` never waits; batches are taken by one thread at a time.

    `queued` and `arrived` count the events that ever were; one that is left out counts as arrived with its batch.
    `hurry` has the next batch sent at once.
    """

    def __init__(self, hurry: Callable[[], None] = lambda: None) -> None:
        self._hurry = hurry
        self.queued = self.arrived = 0
        self._events: deque[Event] = deque()
        self._left_over = ""  # the line of the event that did not fit into the last batch
        self._left_out = 0  # events since the last batch
        self._batch = Batch(0, ())
        self._answered = True

    def publish(self, event: Event) -> None:
        """Queue an event. It becomes JSON later, on the thread that sends it: training waits for this call."""
        self.queued += 1
        self._events.append(event)
        if isinstance(event, EvaluationDone):
            self._hurry()  # a search decides by it whether this run goes on

    def next_batch(self) -> Batch:
        """What to tell next: what has not been answered yet, or the oldest that is queued."""
        if self._answered:
            lines: list[str] = []
            size = 0
            while line := self._left_over or self._next_line():
                self._left_over = line if size and size + len(line) > _BATCH_BYTES else ""
                if self._left_over:
                    break
                size += len(line)
                lines.append(line)
            self._batch = Batch(self._batch.sequence + 1, tuple(lines))
            self._answered = False
        return self._batch

    def _next_line(self) -> str:
        while self._events:
            event = self._events.popleft()
            try:
                line = event.to_json()
            except Exception as error:  # which must not end the heartbeats, nor be waited for
                log.warning("an event of kind %s is left out: %s", event.kind, error)
            else:
                if len(line) <= _EVENT_LIMIT:
                    return line
                log.warning("an event of kind %s is left out: it has %d characters", event.kind, len(line))
            self._left_out += 1
        return ""

    def answered(self) -> None:
        if not self._answered:
            self.arrived += len(self._batch.lines) + self._left_out
            self._left_out = 0
        self._answered = True

    @property
    def is_empty(self) -> bool:
        return self.arrived >= self.queued


class Backlog:
    """What a worker's loop publishes: by the host of lane 0 at once, by everybody else if the one who hosts it dies.

    Events that were still on their way are lost with a worker, but every worker passes through the same steps, so
    another can tell them as well; the coordinator writes each down once. Whoever is quiet about an event keeps it for
    as long as it may be unknown.
    """

    def __init__(self, publish: Callable[[Event], None], timing: Timing) -> None:
        self._publish = publish
        # Nobody completes a step who has not been answered for a lease, so nothing untold is older than that.
        self._window = timing.lease + 2 * timing.heartbeat_every
        self._kept: deque[Event] = deque(maxlen=MOST_KEPT)

    def publish(self, event: Event) -> None:
        """Publish an event, after those that were kept: this worker hosts lane 0 now."""
        if self._kept:
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


class PaceMeter:
    """Told of each step by the thread that trains, and asked by the one that sends heartbeats."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float, int]] = deque()

    def add_step(self, seconds: Mapping[str, float], lanes: int) -> None:
        self._steps.append((seconds[DATA], seconds[COMPUTE], seconds[APPLY], lanes))

    def take(self) -> Pace | None:
        """The mean of the steps that have not been told yet, if there are any.

        Those of a heartbeat that is lost are lost with it: others follow.
        """
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        if not steps:
            return None
        data, compute, apply, lanes = map(sum, zip(*steps, strict=True))
        return Pace(len(steps), steps[-1][3], data / lanes, compute / lanes, apply / len(steps))
