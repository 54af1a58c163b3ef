"""A worker's heartbeats: they renew its lease, and carry its events."""

import logging
import threading
from collections.abc import Callable

import grpc

from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.wire.link import Deadline
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.worker.calls import Calls
from quorate.worker.lease import Clock, Lease
from quorate.worker.outbox import Batch, Outbox

log = logging.getLogger(__name__)


class Heartbeats:
    """Sends them from a thread of its own, and from whoever has something to tell at once; one at a time.

    `compose` writes a heartbeat around a batch of events. `present_again` is called when the coordinator that answers,
    of the given incarnation, does not know this worker: it was started after the one that did.
    """

    def __init__(
        self,
        calls: Calls,
        lease: Lease,
        timing: Timing,
        compose: Callable[[Batch], pb.HeartbeatRequest],
        present_again: Callable[[int], None],
        clock: Clock,
    ) -> None:
        self._calls = calls
        self._lease = lease
        self._timing = timing
        self._compose = compose
        self._present_again = present_again
        self._clock = clock
        self._outbox = Outbox()
        self._turn = threading.Lock()

    def publish(self, event: Event) -> None:
        """Tell an event with the next one."""
        self._outbox.put(event)

    def flush(self, deadline: Deadline) -> bool:
        """Send what is queued by now, for as long as `deadline` allows; whether all of it has arrived. What others
        queue meanwhile is not waited for: a training that is fast enough would never let it end."""
        wanted = self._outbox.queued
        while self._outbox.arrived < wanted:
            remaining = deadline()
            if remaining <= 0:
                return False
            if not self._beat(remaining):
                self._calls.closing.wait(min(self._timing.heartbeat_every, max(0.0, deadline())))
        return True

    def keep_beating(self) -> None:
        """Until the calls are closed."""
        while not self._calls.closing.is_set():
            arrived = self._beat(self._timing.lease / 2)
            # A burst of events goes out at once; a coordinator that is away is not hurried.
            if not arrived or self._outbox.is_empty():
                self._calls.closing.wait(self._timing.heartbeat_every)

    def _beat(self, timeout: float) -> bool:
        """Send one; whether it was answered. A coordinator that restarts is away for a while: no error."""
        end = self._clock() + timeout
        if not self._turn.acquire(timeout=timeout):
            return False
        try:
            request = self._compose(self._outbox.next_batch())
            sent = self._clock()
            reply = self._calls.call(self._calls.stub.Heartbeat, request, max(0.0, end - sent))
            if reply.unknown:
                self._present_again(reply.incarnation)
                return False
            self._outbox.answered()
            self._lease.renew(sent, reply.lease)
            return True
        except (grpc.RpcError, ValueError) as error:  # the latter for a channel that was closed meanwhile
            log.debug("a heartbeat was not answered: %r", error)
            return False
        finally:
            self._turn.release()
