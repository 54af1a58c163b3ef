"""A step that takes too long: reported once, or by step_timeout the end of whoever holds it up."""

from dataclasses import replace

import pytest

from quorate.coordinator.actions import Action, Expel, RecordLoss, Regroup, Warn
from quorate.coordinator.events import HeartbeatReceived, MembershipEvent, Place, Registered, Tick
from quorate.coordinator.membership import decide, start
from quorate.coordinator.states import Forming, State, Training
from quorate.coordinator.terms import Terms
from quorate.core.generation import GenerationId
from quorate.core.timing import Timing

TERMS = Terms(incarnation=1, lanes=4, workers=2, timing=Timing(5.0))


class Watch:
    """A coordinator of two workers, and the clock that it is given."""

    def __init__(self, step_timeout: float | None = None) -> None:
        self.now = 100.0
        self.sequence = 0
        self.done: list[Action] = []
        self.state: State = start(replace(TERMS, step_timeout=step_timeout), self.now)
        for worker in (0, 1):
            self.take(Registered(worker, 4710 + worker, "a", f"10.0.0.{worker}:4000"))
        assert isinstance(self.state, Training)

    def take(self, event: MembershipEvent) -> None:
        decision = decide(self.state, event, self.now)
        self.state = decision.state
        self.done += decision.actions

    def pass_seconds(self, seconds: int, *places: Place) -> None:
        """The workers send a heartbeat each second, from these places."""
        for _ in range(seconds):
            self.now += 1.0
            self.sequence += 1
            for worker, place in enumerate(places):
                pid = 4710 + worker
                self.take(HeartbeatReceived(worker, GenerationId(1, 1), self.sequence, place, pid=pid))
            self.take(Tick())

    def warnings(self) -> list[str]:
        return [action.message for action in self.done if isinstance(action, Warn)]

    def losses(self) -> list[RecordLoss]:
        return [action for action in self.done if isinstance(action, RecordLoss)]


WAITS = Place(17, "exchange")


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
    watch.pass_seconds(100, WAITS, Place(17, phase))
    assert watch.warnings() == [
        "step 17 has not come any further for 30.0 s: worker 0 (pid 4710 on host a) is in exchange, worker 1 "
        f"(pid 4711 on host a) is in {phase}; {why}. It is waited for, since step_timeout is not set."
    ]
    assert isinstance(watch.state, Training)


def test_each_step_is_reported_for_itself() -> None:
    watch = Watch()
    watch.pass_seconds(40, WAITS, Place(17, "compute"))
    watch.pass_seconds(500, Place(18, "exchange"), Place(18, "compute"))
    assert [message.split(" has")[0] for message in watch.warnings()] == ["step 17", "step 18"]


def test_steps_that_always_take_long_are_not_reported() -> None:
    watch = Watch()
    watch.pass_seconds(25, WAITS, Place(17, "compute"))
    for step in range(18, 23):
        watch.pass_seconds(100, Place(step, "exchange"), Place(step, "compute"))
    assert watch.warnings() == []


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint", "copy", "join", "regroup"])
def test_what_is_no_step_takes_what_it_takes(phase: str) -> None:
    watch = Watch(step_timeout=3.0)
    watch.pass_seconds(100, WAITS, Place(17, phase))
    assert (watch.warnings(), watch.losses()) == ([], [])


def test_by_step_timeout_whoever_holds_the_step_up_is_lost() -> None:
    watch = Watch(step_timeout=3.0)
    watch.pass_seconds(4, WAITS, Place(17, "compute"))
    (loss,) = watch.losses()
    assert (loss.failure.worker, loss.failure.step, loss.failure.phase, loss.detect) == (1, 17, "compute", 3.0)
    assert loss.failure.message == (
        "step 17 has not come any further for 3.0 s: worker 0 (pid 4710 on host a) is in exchange, worker 1 (pid 4711 "
        "on host a) is in compute; worker 1 is held up in the task's own code (computing its lanes). That is longer "
        "than step_timeout (3.0)."
    )
    assert Expel(1, 4711) in watch.done
    assert any(isinstance(action, Regroup) for action in watch.done)
    assert isinstance(watch.state, Forming)


def test_of_two_that_hang_the_second_does_not_keep_the_next_generation_waiting() -> None:
    watch = Watch(step_timeout=3.0)
    watch.pass_seconds(6, Place(17, "compute"), Place(17, "compute"))
    assert [loss.failure.worker for loss in watch.losses()] == [0, 1]


def test_a_step_that_goes_on_is_not_hung() -> None:
    watch = Watch(step_timeout=3.0)
    for step in range(1, 20):
        watch.pass_seconds(2, Place(step, "exchange"), Place(step, "compute"))
    assert watch.losses() == []


def test_a_pause_of_the_coordinator_itself_is_nobodys_step() -> None:
    watch = Watch(step_timeout=20.0)
    watch.pass_seconds(2, WAITS, Place(17, "compute"))
    watch.now += 1000.0
    watch.take(Tick())
    watch.pass_seconds(10, WAITS, Place(17, "compute"))
    assert watch.losses() == []
