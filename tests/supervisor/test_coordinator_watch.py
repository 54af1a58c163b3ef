import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from typing import cast

from command import await_condition
from quorate.coordinator.client import SupervisorClient
from quorate.coordinator.places import News, Outcome, Vacancy
from quorate.core.errors import LinkError
from quorate.observe.event import Event
from quorate.observe.events import StepCompleted
from quorate.supervisor.coordinator_process import EventFollower, OutcomeWatch


class Coordinator:
    """Answers as it is told, one answer after the other, and then keeps silent."""

    def __init__(self, *answers: News | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0
        self.silent = threading.Event()

    def news(self, timeout: float, processes: Collection[tuple[int, int]] = (), workers: int = 0) -> News:
        self.asked += 1
        if not self._answers:
            self.silent.wait(60)
            raise LinkError("the call was closed")
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_call_without_answer_does_not_lose_the_outcome() -> None:
    ended = Outcome(None, {"ending": "complete"})
    coordinator = Coordinator(News(None), LinkError("DEADLINE_EXCEEDED"), News(None), News(ended))
    with contextlib.closing(OutcomeWatch(cast(SupervisorClient, coordinator), 30.0)) as watch:
        assert await_condition("the outcome", lambda: watch.outcome) == ended
    assert coordinator.asked == 4


def test_trouble_that_nobody_expects_does_not_lose_the_outcome() -> None:
    ended = Outcome(None, {"ending": "complete"})
    coordinator = Coordinator(RuntimeError("dictionary changed size during iteration"), News(ended))
    with contextlib.closing(OutcomeWatch(cast(SupervisorClient, coordinator), 30.0)) as watch:
        assert await_condition("the outcome", lambda: watch.outcome) == ended


def test_what_there_is_to_do_is_passed_on_in_order_while_the_job_goes_on() -> None:
    first = News(None, ((1, 4711), (2, 4712)), {3: Vacancy(0.0, restore=False)}, workers=4)
    second = News(None, ((2, 4712),), workers=4)
    coordinator = Coordinator(first, second)
    with contextlib.closing(OutcomeWatch(cast(SupervisorClient, coordinator), 30.0)) as watch:
        assert [watch.news.get(timeout=60) for _ in range(2)] == [first, second]
        assert watch.outcome is None
    coordinator.silent.set()


def test_when_it_was_last_answered_is_known() -> None:
    begun = time.monotonic()
    coordinator = Coordinator(LinkError("DEADLINE_EXCEEDED"), News(None, workers=3))
    with contextlib.closing(OutcomeWatch(cast(SupervisorClient, coordinator), 30.0)) as watch:
        await_condition("an answer", lambda: watch.workers == 3)
        assert watch.answered > begun
        last = watch.answered
        await_condition("another question", lambda: coordinator.asked == 3)
        assert watch.answered == last
    coordinator.silent.set()


def test_nobody_is_asked_any_more_once_it_is_closed() -> None:
    others = threading.enumerate()  # those of the tests before may be about to end
    coordinator = Coordinator()
    watch = OutcomeWatch(cast(SupervisorClient, coordinator), 30.0)
    await_condition("the first question", lambda: coordinator.asked)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "outcome" and thread not in others]
    watch.close()
    coordinator.silent.set()
    thread.join(60)
    assert not thread.is_alive()
    assert (coordinator.asked, watch.outcome) == (1, None)


class Log:
    """An event log of which coordinators tell, each until it breaks off: the places at which they do."""

    def __init__(self, count: int, *breaks: int) -> None:
        self.count = count
        self.breaks = list(breaks)
        self.asked: list[int] = []

    def events(self, offset: int, *, follow: bool) -> "Part":
        self.asked.append(offset)
        return Part(self, offset, follow)


class Part:
    """What one call tells: one event at a time."""

    def __init__(self, log: Log, offset: int, follow: bool) -> None:
        self.log, self.offset, self.follow = log, offset, follow
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[tuple[list[Event], int]]:
        while self.offset < self.log.count:
            if self.follow and self.log.breaks[:1] == [self.offset]:
                self.log.breaks.pop(0)
                raise LinkError("the coordinator is gone")
            self.offset += 1
            yield [StepCompleted(step=self.offset)], self.offset
        if self.follow:
            self.cancelled.wait(60)
            raise LinkError("cancelled")

    def cancel(self) -> None:
        self.cancelled.set()


def test_no_event_is_lost_or_told_twice_across_coordinators_and_the_last_are_read_at_the_end() -> None:
    log = Log(20, 7, 7, 13)
    follower = EventFollower(cast(SupervisorClient, log), 5)
    told: list[Event] = []

    def have_come() -> bool:
        told.extend(follower.new())
        return len(told) == 15

    await_condition("all events", have_come)
    log.count = 22
    assert follower.close(read_rest=True)
    assert [event.step for event in [*told, *follower.new()]] == list(range(6, 23))
    assert log.asked == [5, 7, 7, 13, 20]


def test_without_a_coordinator_nobody_is_asked_for_the_rest() -> None:
    log = Log(1)
    follower = EventFollower(cast(SupervisorClient, log), 0)
    await_condition("the event", follower.new)
    log.count = 2
    assert not follower.close(read_rest=False)
    assert follower.new() == []
    assert follower.offset == 1
