"""What a worker tells with its heartbeats: what it has queued and kept, how fast it is; and the lease that it gets."""

import pytest

from made_events import make_event
from quorate.core.generation import APPLY, COMPUTE, DATA, EXCHANGE, Pace
from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.training.activity import Activity
from quorate.wire.proto.channel import decode_pace, encode_pace
from quorate.worker.heartbeats import MOST_KEPT, Backlog, Lease, Outbox, PaceMeter


def step(number: int, time: float = 0.0) -> Event:
    return make_event("step", number, {}, time)


def empty_backlog() -> tuple[Backlog, list[Event]]:
    told: list[Event] = []
    return Backlog(told.append, Timing(5.0)), told


def test_what_a_quiet_worker_has_kept_is_told_before_its_own_first_word() -> None:
    backlog, told = empty_backlog()
    for number in (1, 2):
        backlog.keep(step(number))
    assert told == []
    for number in (3, 4):
        backlog.publish(step(number))
    assert [event.step for event in told] == [1, 2, 3, 4]


def test_only_what_may_be_unknown_is_kept_by_the_time_of_the_newest() -> None:
    backlog, told = empty_backlog()
    for number in range(1, 101):
        backlog.keep(step(number, time=float(number)))
    backlog.publish(step(101, time=1000.0))
    assert [event.step for event in told] == [95, 96, 97, 98, 99, 100, 101]  # a lease of 4 s and two heartbeats


def test_what_is_kept_is_bounded_and_a_clock_that_is_set_back_does_no_harm() -> None:
    backlog, told = empty_backlog()
    for number in range(MOST_KEPT + 5):
        backlog.keep(step(number, time=-float(number)))
    backlog.publish(step(0))
    assert len(told) == MOST_KEPT + 1


def test_whoever_is_ahead_tells_what_it_has_kept_though_another_hosts_lane_0() -> None:
    backlog, told = empty_backlog()
    for number in (6, 7):
        backlog.keep(step(number))
    backlog.publish_kept()
    backlog.publish(step(8))
    assert [event.step for event in told] == [6, 7, 8]


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


def seconds(data: float, compute: float, apply: float) -> dict[str, float]:
    return {DATA: data, COMPUTE: compute, EXCHANGE: 100.0, APPLY: apply}


def test_a_pace_is_the_mean_of_own_work_by_lane_and_waiting_does_not_count() -> None:
    meter = PaceMeter()
    assert meter.take() is None
    meter.add_step(seconds(2.0, 8.0, 1.0), lanes=2)
    meter.add_step(seconds(4.0, 4.0, 3.0), lanes=4)
    assert meter.take() == Pace(steps=2, lanes=4, data_s=1.0, compute_s=2.0, apply_s=2.0)
    assert meter.take() is None, "each step is told once"
    meter.add_step(seconds(1.0, 1.0, 1.0), lanes=1)
    assert meter.take() == Pace(1, 1, 1.0, 1.0, 1.0)


def test_what_a_worker_lingers_counts_for_the_phase() -> None:
    meter = PaceMeter()
    activity = Activity(lambda *_: None, add_step=meter.add_step, stretch=lambda phase, _: 50.0 * (phase == COMPUTE))
    activity.begin_step(1)
    for phase in (DATA, COMPUTE, EXCHANGE, APPLY):
        with activity.during(phase):
            pass
    activity.add_step(activity.seconds, 1)
    pace = meter.take()
    assert pace is not None
    assert 50.0 <= pace.compute_s < 100.0
    assert pace.data_s + pace.apply_s < 50.0


def test_a_pace_travels_as_it_is() -> None:
    pace = Pace(7, 3, 0.25, 0.5, 0.125)
    message = encode_pace(pace)
    assert message is not None
    assert decode_pace(message) == pace
    assert encode_pace(None) is None


def test_lease_counts_from_the_sending() -> None:
    now = 100.0
    lease = Lease(Timing(5.0), lambda: now)
    assert lease.remaining() <= 0
    lease.renew(sent=100.0, seconds=4.0)
    now = 103.0
    assert lease.remaining() == 1.0
    lease.renew(sent=99.0, seconds=4.0)  # an answer that was overtaken takes nothing away
    assert lease.remaining() == 1.0
    lease.renew(sent=103.0, seconds=0.0)  # an answer without a lease renews nothing
    assert lease.remaining() == 1.0
    now = 105.5
    assert lease.remaining() < 0
    assert "has not answered for 5.5 s, longer than the lease of 4.0 s (failure_timeout: 5.0)" in lease.explain("a:1")
    lease.renew(sent=105.5, seconds=0.0)  # nor does it count as an answer
    assert "has not answered for 5.5 s" in lease.explain("a:1")
    lease.end()
    lease.renew(sent=105.5, seconds=4.0)
    assert lease.remaining() <= 0


def test_an_unanswered_batch_is_sent_again_under_its_number() -> None:
    outbox = Outbox()
    outbox.publish(make_event("log", fields={"n": 1}, time=0.0))
    batch = outbox.next_batch()
    outbox.publish(make_event("log", fields={"n": 2}, time=0.0))
    assert outbox.next_batch() == batch
    assert not outbox.is_empty
    outbox.answered()
    following = outbox.next_batch()
    assert (following.sequence, len(following.lines)) == (batch.sequence + 1, 1)
    outbox.answered()
    assert outbox.is_empty


def test_batches_are_bounded_and_an_event_beyond_all_bounds_is_left_out() -> None:
    outbox = Outbox()
    for _ in range(10):
        outbox.publish(make_event("log", fields={"text": "x" * 200_000}))
    outbox.publish(make_event("log", fields={"text": "x" * 10_000_000}))
    sizes = []
    while not outbox.is_empty:
        sizes.append(len(outbox.next_batch().lines))
        outbox.answered()
    assert sizes == [2] * 5


def test_an_event_that_is_left_out_counts_as_arrived_with_those_before_it() -> None:
    outbox = Outbox()
    outbox.publish(make_event("log", fields={"n": 1}))
    outbox.publish(make_event("log", fields={"text": "x" * 10_000_000}))
    outbox.next_batch()
    assert (outbox.queued, outbox.arrived) == (2, 0)
    outbox.answered()
    assert outbox.arrived == 2
    outbox.publish(make_event("log", fields={"text": "x" * 10_000_000}))
    outbox.next_batch()
    outbox.answered()
    assert outbox.arrived == 3
