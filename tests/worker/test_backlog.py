from made_events import make_event
from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.worker.heartbeats import MOST_KEPT, Backlog


def step(number: int, time: float = 0.0) -> Event:
    return make_event("step", number, {}, time)


def test_what_a_quiet_worker_has_kept_is_told_before_its_own_first_word() -> None:
    told: list[Event] = []
    backlog = Backlog(told.append, Timing(5.0))
    for number in (1, 2):
        backlog.keep(step(number))
    assert told == []
    for number in (3, 4):
        backlog.publish(step(number))
    assert [event.step for event in told] == [1, 2, 3, 4]


def test_only_what_may_be_unknown_is_kept_by_the_time_of_the_newest() -> None:
    told: list[Event] = []
    backlog = Backlog(told.append, Timing(5.0))
    for number in range(1, 101):
        backlog.keep(step(number, time=float(number)))
    backlog.publish(step(101, time=1000.0))
    assert [event.step for event in told] == [95, 96, 97, 98, 99, 100, 101]  # a lease of 4 s and two heartbeats


def test_what_is_kept_is_bounded_and_a_clock_that_is_set_back_does_no_harm() -> None:
    told: list[Event] = []
    backlog = Backlog(told.append, Timing(5.0))
    for number in range(MOST_KEPT + 5):
        backlog.keep(step(number, time=-float(number)))
    backlog.publish(step(0))
    assert len(told) == MOST_KEPT + 1


def test_whoever_is_ahead_tells_what_it_has_kept_though_another_hosts_lane_0() -> None:
    told: list[Event] = []
    backlog = Backlog(told.append, Timing(5.0))
    for number in (6, 7):
        backlog.keep(step(number))
    backlog.publish_kept()
    backlog.publish(step(8))
    assert [event.step for event in told] == [6, 7, 8]
