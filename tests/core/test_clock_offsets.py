from hypothesis import given
from hypothesis import strategies as st

from quorate.core.timing import DRIFT, RemoteClock

seconds = st.floats(0.0, 0.5)
trips = st.lists(st.tuples(st.floats(0.01, 100.0), seconds, seconds), min_size=1, max_size=30)


@given(offset=st.floats(-1e6, 1e6), drift=st.floats(-DRIFT, DRIFT), trips=trips, later=st.floats(0.0, 1000.0))
def test_the_offset_is_within_its_uncertainty_whatever_the_network_does(
    offset: float, drift: float, trips: list[tuple[float, float, float]], later: float
) -> None:
    def remote(now: float) -> float:
        return now + offset + drift * now

    clock, now = RemoteClock(), 0.0
    for pause, there, back in trips:
        sent = now + pause
        read = sent + there
        now = read + back
        clock.add(sent, remote(read), now)
    now += later
    known = clock.offset(now)
    assert known is not None
    rounding = 1e-6
    # While the round trip lasted, the clocks drifted, too: by as much as its own length allows.
    drifted = DRIFT * max(there + back for _, there, back in trips)
    assert abs(known.seconds - (remote(now) - now)) <= known.uncertainty + drifted + rounding


@given(trips=trips)
def test_the_least_round_trip_wins_where_clocks_hardly_drift(trips: list[tuple[float, float, float]]) -> None:
    clock, now = RemoteClock(), 0.0
    for pause, there, back in trips:
        sent = now + pause * 1e-6  # all at once, so that nothing grows old
        now = sent + there + back
        clock.add(sent, sent + there + 5.0, now)
    known = clock.offset(now)
    assert known is not None
    least = min((there + back) / 2 for _, there, back in trips)
    assert known.uncertainty <= least + DRIFT * now + 1e-9


def test_nothing_is_known_before_the_first_reply() -> None:
    assert RemoteClock().offset(1.0) is None


def test_a_clock_that_was_set_is_believed_again() -> None:
    clock = RemoteClock()
    clock.add(10.0, 110.05, 10.1)
    clock.add(11.0, 111.3, 11.6)  # a longer trip that does not contradict the first
    known = clock.offset(11.6)
    assert known is not None
    assert abs(known.seconds - 100.0) <= 0.01
    clock.add(12.0, 412.3, 12.6)
    known = clock.offset(12.6)
    assert known is not None
    assert abs(known.seconds - 400.0) <= 0.31


def test_the_clock_of_a_later_coordinator_replaces_that_of_an_earlier_one() -> None:
    clock = RemoteClock()
    clock.add(10.0, 110.01, 10.02, source=1)
    clock.add(11.0, 111.3, 11.6, source=2)
    clock.add(12.0, 112.001, 12.002, source=1)  # an answer that was late
    known = clock.offset(12.002)
    assert known is not None
    assert 0.29 < known.uncertainty < 0.31
