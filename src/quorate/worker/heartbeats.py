"""A worker's heartbeats: they renew its lease, tell how far and how fast it is, and carry its events."""

import logging
import threading
from collections.abc import Callable, Mapping

from quorate.core.errors import LinkError
from quorate.core.runtime import Latch, Runtime
from quorate.core.timing import Timing
from quorate.core.worker_status import APPLY, COMPUTE, DATA, Pace
from quorate.observe.event import Event
from quorate.wire.link import Deadline
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.worker.coordinator_link import CoordinatorLink
from quorate.worker.outbox import Batch, Outbox

log = logging.getLogger(__name__)
_OWN = (DATA, COMPUTE, APPLY)


class Heartbeats:
    """Sends them from a thread of its own, and from whoever has something to tell at once; one at a time.

    `compose` writes a heartbeat around a batch of events. `present_again` is called when the coordinator that answers,
    of the given incarnation, does not know this worker: it was started after the one that did.
    """

    def __init__(
        self,
        link: CoordinatorLink,
        lease: "Lease",
        timing: Timing,
        compose: Callable[[Batch], pb.HeartbeatRequest],
        present_again: Callable[[int], None],
        closing: Latch,
        runtime: Runtime,
    ) -> None:
        self._link = link
        self._lease = lease
        self._timing = timing
        self._compose = compose
        self._present_again = present_again
        self._closing = closing
        self._runtime = runtime
        self._outbox = Outbox()
        self._turn = runtime.condition()
        self._is_taken = False

    def publish(self, event: Event) -> None:
        """Tell an event with the next one."""
        self._outbox.publish(event)

    def flush(self, deadline: Deadline) -> bool:
        """Send what is queued by now, for as long as `deadline` allows; whether all of it has arrived. What others
        queue meanwhile is not waited for: a training that is fast enough would never let it end."""
        wanted = self._outbox.queued
        while self._outbox.arrived < wanted:
            remaining = deadline()
            if remaining <= 0:
                return False
            if not self._beat(remaining):
                self._closing.wait(min(self._timing.heartbeat_every, max(0.0, deadline())))
        return True

    def keep_beating(self) -> None:
        """Until the membership is closed."""
        while not self._closing.is_set:
            try:
                arrived = self._beat(self._timing.lease / 2)
            except Exception:
                # Without heartbeats a worker that could go on would count as lost.
                log.exception("a heartbeat could not be sent")
                arrived = False
            # A burst of events goes out at once; a coordinator that is away is not hurried.
            if not arrived or self._outbox.is_empty():
                self._closing.wait(self._timing.heartbeat_every)

    def _beat(self, timeout: float) -> bool:
        """Send one; whether it was answered. A coordinator that restarts is away for a while: no error."""
        end = self._runtime.now() + timeout
        with self._turn:
            if not self._turn.wait_for(lambda: not self._is_taken, timeout):
                return False
            self._is_taken = True
        try:
            request = self._compose(self._outbox.next_batch())
            sent = self._runtime.now()
            reply = self._link.call(request, max(0.0, end - sent))
            if reply is None:
                return False
            if reply.unknown:
                self._present_again(reply.incarnation)
                return False
            self._outbox.answered()
            self._lease.renew(sent, reply.lease)
            return True
        except LinkError as error:
            log.debug("a heartbeat was not taken: %r", error)
            return False
        finally:
            with self._turn:
                self._is_taken = False
                self._turn.notify_all()


class Lease:
    """A permission that ends by itself. It counts from the *sending* of the call that renewed it."""

    def __init__(self, timing: Timing, now: Callable[[], float]) -> None:
        self._timing = timing
        self._now = now
        self._answered = now()
        self._until = self._answered
        self._ended = False

    def renew(self, sent: float, seconds: float) -> None:
        """A call that was sent at `sent` has been answered with a lease."""
        if seconds > 0:
            self._answered = max(self._answered, sent)
            self._until = max(self._until, sent + seconds)

    def end(self) -> None:
        """The job is over: nothing may be done in its name any more, whatever answer is still on its way."""
        self._ended = True

    def remaining(self) -> float:
        """Seconds that are left; not positive when it is over."""
        return 0.0 if self._ended else self._until - self._now()

    def explain(self, address: str) -> str:
        """Why it is over."""
        return (
            f"the coordinator at {address} has not answered for {self._now() - self._answered:.1f} s, longer than the"
            f" lease of {self._timing.lease:.1f} s (failure_timeout: {self._timing.failure_timeout}); this worker"
            " stops, since its lanes may be somebody else's by now"
        )


class PaceMeter:
    """Told of each step by the thread that trains, and asked by the one that sends heartbeats."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._seconds = dict.fromkeys(_OWN, 0.0)
        self._steps = 0
        self._runs = 0
        self._lanes = 0

    def add_step(self, seconds: Mapping[str, float], lanes: int) -> None:
        """A step with so many lanes took so long, by phase."""
        with self._turn:
            for phase in _OWN:
                self._seconds[phase] += seconds[phase]
            self._steps += 1
            self._runs += lanes
            self._lanes = lanes

    def take(self) -> Pace | None:
        """The mean of the steps that have not been told yet, if there are any.

        Those of a heartbeat that is lost are lost with it: others follow.
        """
        with self._turn:
            seconds, steps, runs = self._seconds, self._steps, self._runs
            self._seconds, self._steps, self._runs = dict.fromkeys(_OWN, 0.0), 0, 0
        if not runs:
            return None
        return Pace(steps, self._lanes, seconds[DATA] / runs, seconds[COMPUTE] / runs, seconds[APPLY] / steps)
