"""Work that stands still: reported once, and by step_timeout the end of whoever holds it up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.played import messages_of
from quorate.coordinator.events import (
    Action,
    Completed,
    ExitReported,
    Expel,
    HeartbeatReceived,
    MembershipEvent,
    Registered,
    Regroup,
    StateReported,
    Tick,
)
from quorate.coordinator.membership import decide, start
from quorate.coordinator.states import Ended, Forming, JobSettings, State, Training
from quorate.core.generation import Cursor, GenerationId, WorkerStatus
from quorate.core.timing import Timing
from quorate.observe.events import WorkerLost

SETTINGS = JobSettings(incarnation=1, lanes=4, workers=2, timing=Timing(5.0))


class Watch:
    """A coordinator of workers, and the clock that it is given."""

    def __init__(self, step_timeout: float | None = None, workers: int = 2) -> None:
        self.now = 100.0
        self.sequence = 0
        self.pids = [4710 + worker for worker in range(workers)]
        self.done: list[Action] = []
        self.state: State = start(replace(SETTINGS, step_timeout=step_timeout, workers=workers), self.now)
        for worker in range(workers):
            self.take(Registered(worker, 4710 + worker, "a", f"10.0.0.{worker}:4000"))
        assert isinstance(self.state, Training)

    def take(self, event: MembershipEvent) -> None:
        decision = decide(self.state, event, self.now)
        self.state = decision.state
        self.done += decision.actions

    def pass_seconds(self, seconds: int, *statuses: WorkerStatus, every: int = 1) -> None:
        """The workers send a heartbeat each second, from these statuses."""
        for _ in range(0, seconds, every):
            self.now += every
            self.sequence += 1
            for worker, status in enumerate(statuses):
                pid = self.pids[worker]
                self.take(HeartbeatReceived(worker, GenerationId(1, 1), self.sequence, status, pid=pid))
            self.take(Tick())

    def replace_lost(self) -> None:
        """Who is left leaves the generation, and another process takes the place of the one that was lost."""
        if isinstance(self.state, Ended):
            return
        (lost,) = self.state.members.expelled
        for known in self.state.members.enrolled:
            if known.within is not None:
                self.take(StateReported(known.worker, known.registration.pid, known.within, Cursor(17)))
        self.take(ExitReported(*lost, "a", None, 9, WorkerStatus()))
        self.pids[lost[0]] += 10
        self.take(Registered(lost[0], self.pids[lost[0]], "a", "10.0.0.9:4000"))

    def let_in(self) -> None:
        """Those at work end their generation at a boundary, and the next has everybody."""
        for known in self.state.members.enrolled if isinstance(self.state, Training) else ():
            if known.within is not None:
                self.take(StateReported(known.worker, known.registration.pid, known.within, Cursor(17)))
        assert isinstance(self.state, Training)
        assert len(self.state.generation.members) == len(self.pids)

    def warnings(self) -> list[str]:
        return messages_of(self.done)

    def losses(self) -> list[WorkerLost]:
        return [action for action in self.done if isinstance(action, WorkerLost)]


WAITS = WorkerStatus(17, "exchange")


@pytest.mark.parametrize(
    ("phase", "why"),
    [
        ("compute", "worker 1 is held up in the task's own code (computing its lanes)"),
        ("data", "worker 1 is held up in the task's own code (reading its data)"),
        ("apply", "worker 1 is held up in its code (applying the update)"),
        ("exchange", "all wait for each other, so the links between them are stuck"),
    ],
)
def test_a_step_that_takes_long_is_reported_once_with_what_everybody_does(phase: str, why: str) -> None:
    watch = Watch()
    watch.pass_seconds(100, WAITS, WorkerStatus(17, phase))
    assert watch.warnings() == [
        "step 17 has made no progress for 30.0 s: worker 0 (pid 4710 on host a) is in exchange, worker 1 "
        f"(pid 4711 on host a) is in {phase}; {why}. It is waited for until step_timeout (not set, so 1800 s "
        "without any progress)."
    ]
    assert isinstance(watch.state, Training)


def test_who_is_alone_waits_for_nobody() -> None:
    watch = Watch(workers=1)
    watch.pass_seconds(100, WorkerStatus(0, "join"))
    (warning,) = watch.warnings()
    assert "; worker 0 is held up in its code (preparing its sums)." in warning


def test_each_step_is_reported_for_itself() -> None:
    watch = Watch()
    watch.pass_seconds(40, WAITS, WorkerStatus(17, "compute"))
    watch.pass_seconds(500, WorkerStatus(18, "exchange"), WorkerStatus(18, "compute"))
    assert [message.split(" has")[0] for message in watch.warnings()] == ["step 17", "step 18"]


def test_steps_that_always_take_long_are_not_reported() -> None:
    watch = Watch()
    watch.pass_seconds(25, WAITS, WorkerStatus(17, "compute"))
    for step in range(18, 23):
        watch.pass_seconds(100, WorkerStatus(step, "exchange"), WorkerStatus(step, "compute"))
    assert watch.warnings() == []


@pytest.mark.parametrize(
    ("stuck", "what", "why"),
    [
        (
            WorkerStatus(17, "evaluation"),
            "the evaluation of step 17",
            "worker 1 is held up in the task's own code (evaluating a batch)",
        ),
        (
            WorkerStatus(17, "checkpoint", waits_for="the disk"),
            "the checkpoint of step 17",
            "worker 1 waits for the disk, which does not answer",
        ),
        (
            WorkerStatus(17, "checkpoint", waits_for="leave of the coordinator to commit"),
            "the checkpoint of step 17",
            "worker 1 waits for leave of the coordinator to commit",
        ),
        (
            WorkerStatus(17, "copy"),
            "the copy of the state of step 17",
            "worker 1 is held up in its code (preparing the copy of its state)",
        ),
        (
            WorkerStatus(17, "join"),
            "the meeting of the workers at step 17",
            "all wait for each other, so the links between them are stuck",
        ),
        (
            WorkerStatus(17, "regroup"),
            "the end of a generation at step 17",
            "worker 1 is held up in its code (leaving its generation)",
        ),
        (
            WorkerStatus(17, "wait"),
            "the beginning of a generation at step 17",
            "worker 1 is held up in its code (entering its generation)",
        ),
    ],
    ids=lambda value: value.phase if isinstance(value, WorkerStatus) else "",
)
def test_every_phase_is_watched(stuck: WorkerStatus, what: str, why: str) -> None:
    watch = Watch()
    waiting = replace(stuck, waits_for="the other workers")
    watch.pass_seconds(1800, waiting, stuck, every=2)
    (warning,) = watch.warnings()
    assert warning.startswith(f"{what} has made no progress for 30.0 s: worker 0 (pid 4710 on host a) is in")
    assert f"is in {stuck.phase} and waits for the other workers, worker 1" in warning
    assert warning.endswith(f"; {why}. It is waited for until step_timeout (not set, so 1800 s without any progress).")
    assert watch.losses() == []
    watch.pass_seconds(2, waiting, stuck)
    (loss,) = watch.losses()
    assert (loss.worker, loss.step, loss.phase) == (1, 17, stuck.phase)
    assert (loss.message or "").endswith("longer than step_timeout (not set, so 1800 s without any progress).")
    assert Expel(1, 4711) in watch.done


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint", "copy", "compute"])
def test_each_piece_of_work_starts_the_clock_anew(phase: str) -> None:
    watch = Watch(step_timeout=20.0)
    for moves in range(50):
        watch.pass_seconds(19, WAITS, WorkerStatus(17, phase, moves))
    assert (watch.warnings(), watch.losses()) == ([], [])
    watch.pass_seconds(3, WAITS, WorkerStatus(17, phase, 49))
    assert [loss.worker for loss in watch.losses()] == [1]


def test_whoever_moved_last_is_not_to_blame_because_another_waits_for_longer() -> None:
    """The others have evaluated their batches long ago, and wait."""
    watch = Watch()
    done = WorkerStatus(17, "evaluation", 5, "the other workers")
    for moves in range(100):
        watch.pass_seconds(2, done, WorkerStatus(17, "evaluation", moves))
    watch.pass_seconds(1801, done, WorkerStatus(17, "evaluation", 99))
    assert [loss.worker for loss in watch.losses()] == [1]


def test_whoever_is_done_waits_for_the_one_whose_last_save_is_stuck() -> None:
    watch = Watch(step_timeout=3.0)
    last = WorkerStatus(17, "checkpoint")
    watch.take(Completed(1, "digest", pid=4711, generation=GenerationId(1, 1)))
    watch.pass_seconds(4, replace(last, waits_for="the disk"), last)
    assert [loss.worker for loss in watch.losses()] == [0]


def test_the_time_limit_grows_with_what_has_taken_longest_so_far() -> None:
    watch = Watch()
    watch.pass_seconds(20, WorkerStatus(1, "evaluation"), WorkerStatus(1, "evaluation", waits_for="the other workers"))
    watch.pass_seconds(2096, WorkerStatus(2, "exchange"), WorkerStatus(2, "compute"), every=2)
    assert watch.losses() == []
    watch.pass_seconds(8, WorkerStatus(2, "exchange"), WorkerStatus(2, "compute"))
    assert [loss.worker for loss in watch.losses()] == [1]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12)), max_size=10))
def test_nobody_is_lost_while_somebody_comes_further_in_time(moves: list[tuple[int, int]]) -> None:
    """Whoever it is that moves, and whatever the others wait for."""
    watch = Watch(step_timeout=12.5)
    statuses = [WorkerStatus(1, "evaluation"), WorkerStatus(1, "evaluation")]
    for worker, seconds in moves:
        watch.pass_seconds(seconds, *statuses)
        statuses[worker] = replace(statuses[worker], moves=statuses[worker].moves + 1)
        watch.pass_seconds(1, *statuses)
        assert watch.losses() == []
    watch.pass_seconds(14, *statuses)
    assert len(watch.losses()) == 1


def test_what_hangs_in_the_same_place_again_and_again_is_given_up() -> None:
    watch = Watch(step_timeout=3.0)
    stuck = WorkerStatus(17, "evaluation")
    for _ in range(3):
        assert not isinstance(watch.state, Ended)
        watch.pass_seconds(4, stuck, stuck)
        watch.replace_lost()
    assert isinstance(watch.state, Ended)
    assert watch.state.failure is not None
    message = watch.state.failure.message
    assert "workers 0 and 1 are held up in the task's own code (evaluating a batch)" in message
    assert "That is longer than step_timeout (3.0)." in message
    assert "Workers have now hung there 3 times in a row, so the job is stopped." in message
    assert len(watch.losses()) == 3


def test_a_hang_does_not_make_those_who_waited_for_it_raise_the_limit() -> None:
    """With the default limit: the innocent break off what they wait in, and the next hang is found as soon."""
    watch = Watch()
    for _ in range(3):
        assert not isinstance(watch.state, Ended)
        watch.pass_seconds(1804, WAITS, WorkerStatus(17, "evaluation"), every=2)
        if isinstance(watch.state, Forming):
            watch.pass_seconds(1, WorkerStatus(16, "regroup"))
            watch.replace_lost()
            watch.let_in()
    assert isinstance(watch.state, Ended)
    assert len(watch.losses()) == 3
    assert len(watch.warnings()) == 3


@pytest.mark.parametrize(
    "waits", [WorkerStatus(17, "exchange"), WorkerStatus(17, "evaluation", waits_for="the other workers")]
)
def test_what_is_waited_for_others_raises_no_limit(waits: WorkerStatus) -> None:
    watch = Watch()
    busy = WorkerStatus(17, "compute")
    for moves in range(60):
        watch.pass_seconds(1, waits, replace(busy, moves=moves))
    watch.pass_seconds(1804, WorkerStatus(18, "apply"), replace(busy, moves=59), every=2)
    assert len(watch.losses()) == 1


def test_those_who_hang_in_one_generation_count_as_one() -> None:
    """A disk that all share stalls: everybody has hung once."""
    watch = Watch(step_timeout=3.0, workers=4)
    stuck = WorkerStatus(17, "data")
    for _ in range(30):
        watch.pass_seconds(1, stuck, stuck, stuck, stuck)
        assert not isinstance(watch.state, Ended)
        for worker, pid in watch.state.members.expelled:
            watch.take(ExitReported(worker, pid, "a", None, 9, stuck))
    assert [loss.worker for loss in watch.losses()] == [0, 1, 2, 3]
    assert isinstance(watch.state, Forming)


def test_by_step_timeout_whoever_holds_the_step_up_is_lost() -> None:
    watch = Watch(step_timeout=3.0)
    watch.pass_seconds(4, WAITS, WorkerStatus(17, "compute"))
    (loss,) = watch.losses()
    assert (loss.worker, loss.step, loss.phase, loss.detect_s) == (1, 17, "compute", 3.0)
    assert loss.message == (
        "step 17 has made no progress for 3.0 s: worker 0 (pid 4710 on host a) is in exchange, worker 1 (pid 4711 "
        "on host a) is in compute; worker 1 is held up in the task's own code (computing its lanes). That is longer "
        "than step_timeout (3.0)."
    )
    assert Expel(1, 4711) in watch.done
    assert any(isinstance(action, Regroup) for action in watch.done)
    assert isinstance(watch.state, Forming)


def test_of_two_that_hang_the_second_does_not_keep_the_next_generation_waiting() -> None:
    watch = Watch(step_timeout=3.0)
    stuck = WorkerStatus(17, "compute")
    watch.pass_seconds(8, stuck, stuck)
    assert [loss.worker for loss in watch.losses()] == [0]  # the other has its time to leave the generation
    watch.pass_seconds(1, stuck, stuck)
    assert [loss.worker for loss in watch.losses()] == [0, 1]


def test_a_step_that_goes_on_is_not_hung() -> None:
    watch = Watch(step_timeout=3.0)
    for step in range(1, 20):
        watch.pass_seconds(2, WorkerStatus(step, "exchange"), WorkerStatus(step, "compute"))
    assert watch.losses() == []


def test_a_pause_of_the_coordinator_itself_is_nobodys_step() -> None:
    watch = Watch(step_timeout=20.0)
    watch.pass_seconds(2, WAITS, WorkerStatus(17, "compute"))
    watch.now += 1000.0
    watch.take(Tick())
    watch.pass_seconds(10, WAITS, WorkerStatus(17, "compute"))
    assert watch.losses() == []
