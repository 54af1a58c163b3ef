from quorate.core.generation import APPLY, COMPUTE, DATA, EXCHANGE, Pace
from quorate.training.activity import Activity
from quorate.wire.proto.channel import decode_pace, encode_pace
from quorate.worker.heartbeats import PaceMeter


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
