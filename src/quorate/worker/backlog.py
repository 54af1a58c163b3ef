"""What a worker's loop tells: by the host of lane 0 at once, by everybody else if the one who hosts it dies.

Events travel with heartbeats. Those that were still on their way are lost with the worker, but every worker passes
through the same steps, so another can tell them as well; the coordinator writes each down once.
"""

from collections import deque
from collections.abc import Callable

from quorate.core.timing import Timing
from quorate.observe.event import Event

MOST_KEPT = 10_000

Publish = Callable[[Event], None]


class Backlog:
    """Keeps what it was quiet about for as long as it may be unknown, and tells it when its turn comes."""

    def __init__(self, publish: Publish, timing: Timing) -> None:
        self._publish = publish
        # Nobody completes a step who has not been answered for a lease, so nothing untold is older than that.
        self._window = timing.lease + 2 * timing.heartbeat_every
        self._kept: deque[Event] = deque(maxlen=MOST_KEPT)

    def tell(self, event: Event) -> None:
        """Tell an event, after those that were kept: this worker hosts lane 0 now."""
        self.tell_kept()
        self._publish(event)

    def tell_kept(self) -> None:
        """Tell what was kept, in its order: if this worker is ahead of the others, those who copy its state cannot."""
        while self._kept:
            self._publish(self._kept.popleft())

    def keep(self, event: Event) -> None:
        """Be quiet about an event that another tells."""
        self._kept.append(event)
        # By the newest, not by the clock: while a loss is being noticed nothing happens that could be told.
        while event.time - self._kept[0].time > self._window:
            self._kept.popleft()
