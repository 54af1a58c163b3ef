import contextlib
import threading

from command import await_condition
from quorate.coordinator.client import Outcome
from quorate.core.errors import LinkError
from quorate.engines.outcome_watch import OutcomeWatch


class Coordinator:
    """Answers as it is told, one answer after the other, and then keeps silent."""

    def __init__(self, *answers: Outcome | LinkError | None) -> None:
        self._answers = list(answers)
        self.asked = 0
        self.silent = threading.Event()

    def outcome(self, timeout: float) -> Outcome | None:
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
    coordinator = Coordinator(None, LinkError("DEADLINE_EXCEEDED"), None, ended)
    with contextlib.closing(OutcomeWatch(coordinator)) as watch:
        assert await_condition("the outcome", lambda: watch.outcome) == ended
    assert coordinator.asked == 4


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
