"""A link inside one process, for tests and simulation.

It holds nothing: a send returns only when the peer has taken the bytes. A schedule that works here leans on no buffer.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quorate.core.digests import Buffer
from quorate.core.errors import PeerLost
from quorate.wire.link import CLOSED_HERE, LONGEST_WAIT, Deadline, Tag, check_frame, flat_bytes


@dataclass
class _Offer:
    """A frame that waits to be taken."""

    tag: Tag
    payload: memoryview
    taken: bool = False


class _Meeting:
    """What both ends share: a place for one offer in each direction."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.offers: list[_Offer | None] = [None, None]
        self.closed_by: int | None = None


def memory_link_pair(names: tuple[str, str]) -> tuple["MemoryLink", "MemoryLink"]:
    """The two ends of a link, named after who holds each."""
    meeting = _Meeting()
    return MemoryLink(meeting, 0, peer=names[1]), MemoryLink(meeting, 1, peer=names[0])


class MemoryLink:
    """One end of an unbuffered link."""

    def __init__(self, meeting: _Meeting, side: int, peer: str) -> None:
        self._meeting = meeting
        self._side = side
        self.peer = peer

    def send(self, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        """Offer one frame and wait until the peer has taken it."""
        with self._operation():
            offer = _Offer(tag, flat_bytes(payload))
            self._meeting.offers[self._side] = offer
            self._meeting.condition.notify_all()
            self._wait_until(lambda: offer.taken, deadline)

    def receive(self, tag: Tag, deadline: Deadline) -> bytearray:
        """The payload of the next frame."""
        with self._operation():
            offer = self._next_offer(tag, deadline)
            check_frame(tag, None, tag, offer.payload.nbytes, self.peer)
            payload = bytearray(offer.payload)
            self._take(offer)
            return payload

    def receive_into(self, tag: Tag, buffer: Buffer, deadline: Deadline) -> None:
        """Put the payload of the next frame into `buffer`."""
        with self._operation():
            view = flat_bytes(buffer)
            offer = self._next_offer(tag, deadline)
            check_frame(tag, view.nbytes, tag, offer.payload.nbytes, self.peer)
            if view.nbytes:
                view[:] = offer.payload
            self._take(offer)

    def close(self) -> None:
        """End every wait on both ends."""
        with self._meeting.condition:
            if self._meeting.closed_by is None:
                self._meeting.closed_by = self._side
            self._meeting.condition.notify_all()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        with self._meeting.condition:
            try:
                self._check_open()
                yield
            except BaseException:
                self.close()
                raise

    def _next_offer(self, tag: Tag, deadline: Deadline) -> _Offer:
        self._wait_until(lambda: self._offered() is not None, deadline)
        offer = self._offered()
        assert offer is not None
        check_frame(tag, 0, offer.tag, 0, self.peer)
        return offer

    def _offered(self) -> _Offer | None:
        return self._meeting.offers[1 - self._side]

    def _take(self, offer: _Offer) -> None:
        offer.taken = True
        self._meeting.offers[1 - self._side] = None
        self._meeting.condition.notify_all()

    def _wait_until(self, happened: Callable[[], bool], deadline: Deadline) -> None:
        began = time.monotonic()
        while not happened():
            self._check_open()
            remaining = deadline()
            if remaining <= 0:
                raise PeerLost(self.peer, f"no frame for {time.monotonic() - began:.1f} s")
            self._meeting.condition.wait(min(remaining, LONGEST_WAIT))

    def _check_open(self) -> None:
        if self._meeting.closed_by == self._side:
            raise PeerLost(self.peer, CLOSED_HERE)
        if self._meeting.closed_by is not None:
            raise PeerLost(self.peer, "it closed the link")
