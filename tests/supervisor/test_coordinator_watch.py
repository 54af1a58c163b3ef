import contextlib
import threading
import time
from collections.abc import Collection

from command import await_condition
from quorate.coordinator.client import News, Outcome, Vacancy
from quorate.core.errors import LinkError
from quorate.engines.outcome_watch import OutcomeWatch


class Coordinator:
    """Answers as it is told, one answer after the other, and then keeps silent."""

    def __init__(self, *answers: News | LinkError) -> None:
        self._answers = list(answers)
        self.asked = 0
        self.silent = threading.Event()

    def news(self, timeout: float, seen_to: Collection[int] = (), workers: int = 0) -> News:
        self.asked += 1
        if not self._answers:
            self.silent.wait(5)
            raise LinkError("the call was closed")
        answer = self._answers.pop(0)
        if isinstance(answer, LinkError):
            raise answer
        return answer


def test_a_call_without_answer_does_not_lose_the_outcome() -> None:
    ended = Outcome(None, {"ending": "complete"})
    coordinator = Coordinator(News(None), LinkError("DEADLINE_EXCEEDED"), News(None), News(ended))
    with contextlib.closing(OutcomeWatch(coordinator)) as watch:
        assert await_condition("the outcome", lambda: watch.outcome) == ended
    assert coordinator.asked == 4


def test_what_there_is_to_do_is_passed_on_in_order_while_the_job_goes_on() -> None:
    first = News(None, ((1, 4711), (2, 4712)), {3: Vacancy(0.0, restore=False)}, workers=4)
    second = News(None, ((2, 4712),), workers=4)
    coordinator = Coordinator(first, second)
    with contextlib.closing(OutcomeWatch(coordinator)) as watch:
        assert [watch.news.get(timeout=10) for _ in range(2)] == [first, second]
        assert watch.outcome is None
    coordinator.silent.set()


def test_when_it_was_last_answered_is_known() -> None:
    begun = time.monotonic()
    coordinator = Coordinator(LinkError("DEADLINE_EXCEEDED"), News(None, workers=3))
    with contextlib.closing(OutcomeWatch(coordinator)) as watch:
        await_condition("an answer", lambda: watch.workers == 3)
        assert watch.answered > begun
        last = watch.answered
        await_condition("another question", lambda: coordinator.asked == 3)
        assert watch.answered == last
    coordinator.silent.set()


def test_nobody_is_asked_any_more_once_it_is_closed() -> None:
    coordinator = Coordinator()
    watch = OutcomeWatch(coordinator)
    await_condition("the first question", lambda: coordinator.asked)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "outcome"]
    watch.close()
    coordinator.silent.set()
    thread.join(5)
    assert not thread.is_alive()
    assert (coordinator.asked, watch.outcome) == (1, None)
