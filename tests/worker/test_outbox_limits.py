"""What just fits into a heartbeat, and what does not."""

import pytest

from made_events import make_event
from quorate.observe.event import Event
from quorate.worker.heartbeats import Outbox

BATCH = 512 * 2**10
EVENT = 4 * 2**20


def event_of(size: int) -> Event:
    """An event whose line has so many characters."""
    empty = len(make_event("log", fields={"text": ""}, time=0.0).to_json())
    event = make_event("log", fields={"text": "x" * (size - empty)}, time=0.0)
    assert len(event.to_json()) == size
    return event


@pytest.mark.parametrize(("second", "lines"), [(BATCH // 2, 2), (BATCH // 2 + 1, 1)])
def test_a_batch_is_full_when_it_is_full(second: int, lines: int) -> None:
    outbox = Outbox()
    outbox.publish(event_of(BATCH - BATCH // 2))
    outbox.publish(event_of(second))
    assert len(outbox.next_batch().lines) == lines


@pytest.mark.parametrize(("size", "lines"), [(EVENT, 1), (EVENT + 1, 0)])
def test_an_event_of_the_largest_size_is_told(size: int, lines: int) -> None:
    outbox = Outbox()
    outbox.publish(event_of(size))
    assert len(outbox.next_batch().lines) == lines
