"""Workers that are slower than the others: named once, never killed; with `balance: speed` they get fewer lanes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.played import SETTINGS, declared, killed, last_of, messages_of, pid_of, registered, reported, training
from quorate.coordinator.events import Action, DeclareGeneration, Expel, HeartbeatReceived, Regroup, StopRequested
from quorate.coordinator.membership import decide
from quorate.coordinator.speed import measure, share_lanes
from quorate.coordinator.states import JobSettings, Measured, State, Training
from quorate.core.generation import GenerationId, Pace, WorkerStatus
from quorate.observe.events import WorkerLost

SPEED = replace(SETTINGS, balance="speed")
STEPS_EACH = 5


def pace(compute: float, data: float = 0.001, *, lanes: int = 3, steps: int = STEPS_EACH) -> Pace:
    return Pace(steps, lanes, data, compute, 0.002)


class Watch:
    """A coordinator of three workers with eight lanes, and the clock that it is given."""

    def __init__(self, settings: JobSettings = SETTINGS) -> None:
        self.now = 0.0
        self.step = 0
        self.sequence = 0
        self.done: list[Action] = []
        self.state: State = training(settings)

    def beat(self, paces: Mapping[int, Pace | None], times: int = 1) -> None:
        """Every half a second and five steps, each worker tells its pace."""
        assert isinstance(self.state, Training)
        for _ in range(times):
            self.now += 0.5
            self.step += STEPS_EACH
            self.sequence += 1
            for worker, told in paces.items():
                status = WorkerStatus(self.step, "compute")
                within = self.state.generation.id
                self.take(HeartbeatReceived(worker, within, self.sequence, status, pid=pid_of(worker), pace=told))

    def take(self, event: object) -> None:
        decision = decide(self.state, event, self.now)  # type: ignore[arg-type]
        self.state = decision.state
        self.done += decision.actions

    def regroup(self) -> tuple[int, ...]:
        """All leave at a boundary; how many lanes each hosts then."""
        assert isinstance(self.state, Training)
        within = self.state.generation.id.number
        for worker in range(3):
            self.take(reported(worker, self.step, within))
        (generation,) = [done.generation for done in self.done[-1:] if isinstance(done, DeclareGeneration)]
        return tuple(len(member.lanes) for member in generation.members)

    def warnings(self) -> list[str]:
        return messages_of(self.done)

    def notices(self) -> list[str]:
        return messages_of(self.done, "info")

    def regroupings(self) -> list[Regroup]:
        return [action for action in self.done if isinstance(action, Regroup) and action.at_boundary]


FAST, SLOW = pace(0.02), pace(0.08)
EVEN = {0: FAST, 1: FAST, 2: FAST}
ONE_SLOW = {0: FAST, 1: SLOW, 2: FAST}


def test_a_straggler_is_named_once_with_its_host_phase_lanes_and_the_remedy() -> None:
    watch = Watch()
    watch.beat(ONE_SLOW, times=20)
    assert watch.warnings() == [
        "worker 1 (pid 4711 on host a) is slow in compute: each of its lanes 3 to 5 takes 81 ms, 3.9 times as long as "
        "those of the others (21 ms), who wait for it at every step. Look at that host, or set `balance: speed`, which "
        "gives it fewer lanes and changes no bit of the result."
    ]
    assert not [action for action in watch.done if isinstance(action, WorkerLost | Expel | Regroup)]


def test_slow_data_is_told_from_slow_compute() -> None:
    watch = Watch()
    watch.beat({0: FAST, 1: FAST, 2: pace(0.025, data=0.3, lanes=2)}, times=10)
    (warning,) = watch.warnings()
    assert "worker 2 (pid 4712 on host a) is slow in data: each of its lanes 6 to 7 takes 325 ms" in warning


def test_with_balance_by_speed_the_remedy_is_under_way() -> None:
    watch = Watch(SPEED)
    watch.beat(ONE_SLOW, times=10)
    (warning,) = watch.warnings()
    assert warning.endswith(
        "(21 ms), who wait for it at every step. By `balance: speed` it hosts fewer lanes where that shortens the step."
    )


def test_who_is_done_with_the_others_thanks_to_fewer_lanes_holds_nobody_up() -> None:
    watch = Watch(SPEED)
    watch.beat({0: pace(0.02, lanes=4), 1: pace(0.06, lanes=1), 2: pace(0.02, lanes=3)}, times=20)
    (warning,) = watch.warnings()
    assert "2.9 times as long as those of the others (21 ms). By `balance: speed`" in warning


def test_it_takes_twenty_steps_and_two_seconds_of_work() -> None:
    few_steps = Watch()
    few_steps.beat({0: pace(1.0), 1: pace(4.0), 2: pace(1.0)}, times=3)
    assert few_steps.warnings() == []
    # Worker 1 is judged first when worker 0 alone has told its pace, and last in the fourth round: 4 x 5 steps.
    few_steps.beat({0: pace(1.0), 1: pace(4.0), 2: pace(1.0)})
    assert len(few_steps.warnings()) == 1
    little_work = Watch()
    little_work.beat({0: pace(0.001), 1: pace(0.009), 2: pace(0.001)}, times=10)  # 50 steps of 32 ms
    assert little_work.warnings() == []
    little_work.beat({0: pace(0.001), 1: pace(0.009), 2: pace(0.001)}, times=4)
    assert len(little_work.warnings()) == 1


def test_less_than_five_milliseconds_a_step_do_not_matter() -> None:
    watch = Watch()
    watch.beat({0: pace(0.0001, 0), 1: pace(0.0016, 0), 2: pace(0.0001, 0)}, times=1000)
    assert watch.warnings() == []


def test_who_is_slow_for_a_moment_is_no_straggler() -> None:
    watch = Watch()
    for _ in range(20):
        watch.beat(ONE_SLOW, times=2)
        watch.beat(EVEN, times=4)
    assert watch.warnings() == []


def test_it_is_told_again_only_after_it_has_recovered() -> None:
    watch = Watch()
    watch.beat(ONE_SLOW, times=20)
    watch.beat(EVEN | {1: pace(0.034)}, times=20)  # not as slow as before, and not as fast as the others
    watch.beat(ONE_SLOW, times=20)
    assert len(watch.warnings()) == 1
    watch.beat(EVEN, times=20)
    watch.beat(ONE_SLOW, times=20)
    assert len(watch.warnings()) == 2


def test_a_heartbeat_that_is_sent_again_counts_once() -> None:
    watch = Watch()
    for _ in range(10):
        watch.beat({0: FAST, 2: FAST})
        watch.take(HeartbeatReceived(1, GenerationId(3, 1), 1, WorkerStatus(5, "compute"), pid=pid_of(1), pace=SLOW))
    assert watch.warnings() == []


def test_nobody_is_slow_alone() -> None:
    watch = Watch(replace(SETTINGS, workers=1))
    watch.beat({0: SLOW}, times=50)
    assert watch.warnings() == []


def test_who_takes_the_place_of_a_straggler_begins_anew() -> None:
    watch = Watch()
    watch.beat(ONE_SLOW, times=20)
    watch.take(killed(1))
    watch.take(reported(0, watch.step))
    watch.take(reported(2, watch.step))
    watch.take(registered(1, life=1))
    assert watch.state.members.find(1).measured is None  # type: ignore[union-attr]
    assert watch.state.members.find(0).measured is not None  # type: ignore[union-attr]


@given(st.lists(st.tuples(*[st.floats(0.02, 0.039)] * 3), min_size=1, max_size=40))
def test_nobody_is_named_who_is_never_twice_as_slow(rounds: list[tuple[float, float, float]]) -> None:
    watch = Watch()
    for seconds in rounds:
        watch.beat({worker: pace(compute, data=0.0) for worker, compute in enumerate(seconds)})
    assert watch.warnings() == []


@given(st.lists(st.builds(Pace, st.integers(1, 50), st.just(2), *[st.floats(1e-4, 10.0)] * 3), min_size=1, max_size=20))
def test_a_smoothed_pace_lies_between_those_it_is_made_of(paces: list[Pace]) -> None:
    measured: Measured | None = None
    for told in paces:
        measured = measure(measured, told)
    assert measured is not None
    assert measured.pace.steps == sum(told.steps for told in paces)
    for part in ("data_s", "compute_s", "apply_s"):
        parts = [getattr(told, part) for told in paces]
        assert min(parts) * 0.999 <= getattr(measured.pace, part) <= max(parts) * 1.001


# --- sharing by speed


def test_by_speed_lanes_are_shared_anew_at_a_step_boundary_and_the_reason_is_told() -> None:
    watch = Watch(SPEED)
    watch.beat(ONE_SLOW, times=12)
    assert watch.regroupings() == [Regroup(GenerationId(3, 1), at_boundary=True)]
    (notice,) = watch.notices()
    assert notice == (
        "the lanes are redistributed by speed at the next step boundary: worker 0 (21 ms a lane) hosts 4 instead of 3, "
        "worker 1 (81 ms a lane) hosts 1 instead of 3, worker 2 (21 ms a lane) hosts 3 instead of 2. The work of a "
        "step is expected to take 86 ms instead of 245 ms."
    )
    assert watch.regroup() == (4, 1, 3)
    watch.beat(ONE_SLOW | {1: pace(0.08, lanes=1)}, times=50)
    assert len(watch.regroupings()) == 1, "it is as good as can be"
    assert not [action for action in watch.done if isinstance(action, WorkerLost | Expel)]


@pytest.mark.parametrize("settings", [SETTINGS, replace(SPEED, timing=replace(SPEED.timing, failure_timeout=1000.0))])
def test_lanes_stay_where_they_are_by_default_and_while_it_is_too_early(settings: JobSettings) -> None:
    watch = Watch(settings)
    watch.beat(ONE_SLOW, times=30)  # 15 s, and ten heartbeats would be 20 s
    assert watch.regroupings() == []


def test_twenty_steps_lie_between_two_sharings() -> None:
    watch = Watch(SPEED)
    watch.now = 1000.0
    watch.beat(ONE_SLOW, times=3)
    assert watch.regroupings() == []
    watch.beat(ONE_SLOW)
    assert len(watch.regroupings()) == 1
    watch.regroup()
    watch.now += 1000.0
    other = {0: pace(0.2), 1: FAST, 2: FAST}
    watch.beat(other, times=3)
    assert len(watch.regroupings()) == 1
    watch.beat(other)
    assert len(watch.regroupings()) == 2


def test_lanes_do_not_move_for_less_than_a_fifth() -> None:
    watch = Watch(SPEED)
    watch.beat({0: FAST, 1: pace(0.022), 2: pace(0.015)}, times=100)
    assert watch.regroupings() == []


def test_lanes_do_not_move_where_the_job_stops_or_somebody_has_not_been_measured() -> None:
    stopping = Watch(SPEED)
    stopping.take(StopRequested("interrupted"))
    stopping.beat(ONE_SLOW, times=100)
    assert stopping.regroupings() == []
    unmeasured = Watch(SPEED)
    unmeasured.beat(ONE_SLOW | {2: None}, times=100)
    assert unmeasured.regroupings() == []


def test_speeds_count_whenever_a_generation_forms_and_a_newcomer_is_like_most() -> None:
    watch = Watch(SPEED)
    watch.beat(ONE_SLOW, times=4)
    decision = last_of(watch.state, (3.0, killed(2)), (3.1, reported(0, 20)), (3.2, reported(1, 20)))
    assert [len(member.lanes) for member in declared(decision).members] == [7, 1]
    members = decision.state.members  # type: ignore[union-attr]
    newcomer = replace(members.enrolled[0], registration=registered(2, life=1), measured=None)
    sharing = share_lanes(members, (*members.enrolled, newcomer))
    assert [len(hosted) for hosted in sharing] == [5, 1, 2]


@given(st.lists(st.tuples(*[st.floats(0.005, 0.5)] * 3), min_size=1, max_size=30))
def test_whatever_the_speeds_lanes_move_only_for_a_gain_and_not_too_often(
    rounds: list[tuple[float, float, float]],
) -> None:
    watch = Watch(SPEED)
    last = 0
    for seconds in rounds:
        before = len(watch.regroupings())
        watch.beat({worker: pace(compute) for worker, compute in enumerate(seconds)})
        if len(watch.regroupings()) > before:
            assert len(watch.regroupings()) == before + 1
            assert watch.step - last >= 20
            last = watch.step
            shares = watch.regroup()
            assert sum(shares) == 8
            assert min(shares) >= 1
