import time

import pytest

from quorate.core.generation import COPY, DATA, Cursor, Generation, GenerationId, Member
from quorate.core.timing import ClockOffset
from quorate.observe.event import Event
from quorate.observe.events import read_event
from quorate.observe.seldom_events import StepTraced
from quorate.training.activity import Tracer

GENERATION = Generation(
    GenerationId(1, 4), (Member(2, "a:1", range(1), cursor=Cursor(6)), Member(0, "b:1", range(1, 2), cursor=Cursor(6)))
)


class Told(list[StepTraced]):
    def publish(self, event: Event) -> None:
        assert isinstance(event, StepTraced)
        self.append(event)

    @property
    def roots(self) -> list[tuple[str, int | None]]:
        return [(event.spans[0].name, event.step) for event in self]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def tracer(told: Told) -> Tracer:
    return Tracer(5, 0, told.publish, lambda: None)


def test_one_step_in_so_many_is_traced_and_the_first_of_a_generation(tracer: Tracer, told: Told) -> None:
    tracer.join(GENERATION)
    traced = [step for step in range(7, 22) if tracer.begin_step(step) is not None]
    assert traced == [7, 10, 15, 20]
    tracer.end(21)
    assert told.roots == [("join", 7), ("step", 7), ("step", 10), ("step", 15), ("step", 20)]


def test_a_step_lasts_until_the_next_begins(tracer: Tracer, told: Told) -> None:
    tracer.join(GENERATION)
    spans = tracer.begin_step(7)
    assert spans is not None
    spans.enter("evaluation", None)  # after the step itself
    spans.leave()
    assert told.roots == [("join", 7)]
    tracer.begin_step(8)
    assert [span.name for span in told[-1].spans] == ["step", "evaluation"]


def test_a_step_that_was_not_completed_is_not_told(tracer: Tracer, told: Told) -> None:
    tracer.join(GENERATION)
    assert tracer.begin_step(7) is not None
    tracer.end(completed=6)
    assert told.roots == [("join", 7)]


def test_the_last_step_is_told_at_the_end(tracer: Tracer, told: Told) -> None:
    tracer.join(GENERATION)
    assert tracer.begin_step(7) is not None
    tracer.end(completed=7)
    assert told.roots[-1] == ("step", 7)


def test_a_generation_that_ends_before_its_first_step_tells_nothing(tracer: Tracer, told: Told) -> None:
    tracer.join(GENERATION)
    tracer.end(completed=6)
    assert not told


def test_the_way_into_a_generation_has_its_parts(tracer: Tracer, told: Told) -> None:
    tracer.join(GENERATION)
    tracer.enter(COPY)
    tracer.enter("build")
    tracer.begin_step(7)
    assert [span.name for span in told[0].spans] == ["join", "connect", "copy", "build"]
    assert (told[0].generation, told[0].worker, told[0].first) == ("1.4", 0, 2)


def test_times_are_the_coordinators(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the worker's own clock says, which is a quarter of a second behind."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 0.25)
    tracer = Tracer(1, 0, told.publish, lambda: ClockOffset(real() - time.monotonic(), 0.001))
    tracer.join(GENERATION)
    before = real()
    tracer.begin_step(7)
    tracer.begin_step(8)
    step = told[-1]
    assert before - 0.1 < step.began < real() + 0.1
    assert step.clock_offset is not None
    assert abs(step.clock_offset - 0.25) < 0.1
    assert step.clock_uncertainty == 0.001


def test_where_nothing_is_known_of_the_coordinators_clock_the_workers_counts(tracer: Tracer, told: Told) -> None:
    tracer.join(GENERATION)
    before = time.time()
    tracer.begin_step(7)
    tracer.end(7)
    assert before - 0.01 < told[-1].began < time.time() + 0.01
    assert told[-1].clock_uncertainty is None


def test_what_is_told_is_read_again(tracer: Tracer, told: Told) -> None:
    tracer.join(GENERATION)
    spans = tracer.begin_step(7)
    assert spans is not None
    spans.enter(DATA, 3)
    spans.leave()
    tracer.end(7)
    again = read_event(told[-1].to_json())
    assert isinstance(again, StepTraced)
    assert again.extra is None
    assert [(span.name, span.parent, span.attributes) for span in again.spans] == [
        ("step", -1, {}),
        ("data", 0, {"lane": 3}),
    ]
    assert again.spans[1].start == round(told[-1].spans[1].start, 7)
