"""The link between two workers."""

from collections.abc import Callable
from typing import Protocol

from quorate.core.digests import Buffer
from quorate.core.errors import PeerLost
from quorate.wire.frame import Tag

Deadline = Callable[[], float]
"""Seconds that may still be waited. It is asked again at every wake-up, from any thread, since a lease can be renewed
while one waits; it may raise an error of its own, which passes through the wait."""

RECEIVE_LIMIT = 2**30
"""The most bytes that `receive` takes in one frame."""

LONGEST_WAIT = 1.0
"""Seconds between two questions to a deadline, so that one that starts to raise is heard."""

AGAIN = 0.01
"""Seconds before a worker whose door is crowded is called again."""

CLOSED_HERE = PeerLost.CLOSED_HERE


class Link(Protocol):
    """Carries frames both ways, in order. At any time one thread may send and another receive.

    A dead or closed peer is a PeerLost, at once; so is a wait whose deadline is over. A frame of another generation,
    tag or length is a FrameError. After any error the link is closed: its stream has lost its place.
    """

    def send(self, tag: Tag, payload: Buffer, deadline: Deadline) -> None:
        """Send one frame; the payload must not change until this returns."""
        ...

    def receive(self, tag: Tag, deadline: Deadline) -> bytearray:
        """The payload of the next frame, of any length up to `RECEIVE_LIMIT`."""
        ...

    def receive_into(self, tag: Tag, buffer: Buffer, deadline: Deadline) -> None:
        """Put the payload of the next frame into `buffer`, which it must fill exactly."""
        ...

    def close(self) -> None:
        """End every wait on both ends with PeerLost. Any thread may call it, any number of times."""
        ...
