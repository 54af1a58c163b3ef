"""A worker's way through its generations: what it does in which order, with a trainer that notes what it is asked."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from made_events import make_event
from quorate.core.errors import GenerationOver, LinkError, PeerLost
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Member
from quorate.core.timing import Timing
from quorate.observe.event import Event
from quorate.worker.heartbeats import Backlog
from quorate.worker.membership import Membership
from quorate.worker.membership_view import JobEnded, MembershipView
from quorate.worker.session import WorkerSession

FIRST, SECOND = 1, 2


def generation(number: int, own: int = 4, others: int = 4) -> Generation:
    members = (Member(0, "a:1", range(2), "", Cursor(own)), Member(1, "a:2", range(2, 4), "", Cursor(others)))
    return Generation(GenerationId(1, number), members)


class NotedView(MembershipView):
    """Tells what is said to it."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def hold_state(self) -> None:
        self._notes.append("holds")

    def close_when_over(self, generation: Generation, close: Callable[[], None]) -> None:
        self._notes.append("watched" if "abort" in getattr(close, "__name__", "") else "not watched")


class NotedMembership(Membership):
    """Tells what is said to it; `complete` is answered as planned."""

    def __init__(self, notes: list[str], generations: list[Generation]) -> None:
        self._notes = notes
        self._generations = generations
        self.view = NotedView(notes)

    def await_generation(self, after: Generation | None = None) -> Generation:
        if not self._generations:
            raise JobEnded(None)
        return self._generations.pop(0)

    def publish(self, event: Event) -> None:
        self._notes.append(f"published {event.step}")

    def flush_before_report(self) -> None:
        self._notes.append("flushed")

    def report_state(
        self, generation: Generation, cursor: Cursor, symptom: Failure | None, *, is_saved: bool = False
    ) -> None:
        why = f" for {symptom.kind}" if symptom else ""
        self._notes.append(f"left {generation.id} at {cursor.step}{why}{', saved' if is_saved else ''}")

    def complete(self, digest: str, result: Any) -> bool:
        self._notes.append(f"done: {result['ending']}")
        return digest == "right"


class NotedLinks:
    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def abort(self) -> None:
        self._notes.append("aborted")

    def close(self) -> None:
        self._notes.append("closed")


class NotedTrainer:
    """Its generations end as planned: with an error, with an ending of the job, or with neither."""

    def __init__(self, notes: list[str], *endings: Exception | str | None, digest: str = "right") -> None:
        self._notes = notes
        self._endings = list(endings)
        self._digest = digest
        self.cursor = Cursor(4)
        self.is_saved = False

    def connect(self, generation: Generation) -> NotedLinks:
        self._notes.append(f"connects {generation.id}")
        return NotedLinks(self._notes)

    def align(self, generation: Generation, links: NotedLinks) -> None:
        self._notes.append("aligned")

    def train(self, generation: Generation, links: NotedLinks) -> str | None:
        ending = self._endings.pop(0)
        if isinstance(ending, Exception):
            raise ending
        self.cursor, self.is_saved = self.cursor.trained(), True
        return ending

    def result(self, ending: str) -> tuple[str, dict[str, Any]]:
        return self._digest, {"ending": ending}


def session(trainer: NotedTrainer, membership: NotedMembership, notes: list[str]) -> WorkerSession:
    backlog = Backlog(membership.publish, Timing(5.0))
    backlog.keep(make_event("step", 4))
    return WorkerSession(0, trainer, membership, backlog, lambda step, phase, lane: notes.append(f"{phase} at {step}"))


def noted(
    *generations: Generation,
    endings: tuple[Exception | str | None, ...] = (),
    digest: str = "right",
    has_ended: bool = False,
    raises: type[Exception] | None = None,
) -> list[str]:
    """What a worker does in these generations of its job."""
    notes: list[str] = []
    membership = NotedMembership(notes, list(generations))
    membership.view.ended = has_ended
    with pytest.raises(raises) if raises else nullcontext():
        session(NotedTrainer(notes, *endings, digest=digest), membership, notes).complete()
    return notes


def test_a_generation_is_closed_and_what_is_kept_is_told_before_the_state_is_reported() -> None:
    assert noted(generation(FIRST), generation(SECOND, own=5, others=5), endings=(None, "complete")) == [
        *("holds", "connects 1.1", "watched", "aligned", "holds", "not watched", "closed"),
        *("regroup at 5", "published 4", "flushed", "left 1.1 at 5, saved"),
        *("holds", "connects 1.2", "watched", "aligned", "holds", "done: complete", "not watched", "closed"),
    ]


def test_who_is_behind_holds_the_state_only_when_it_has_copied_it() -> None:
    notes = noted(generation(FIRST, own=4, others=9), endings=("complete",))
    assert notes[:4] == ["connects 1.1", "watched", "aligned", "holds"]


@pytest.mark.parametrize(
    ("error", "told"),
    [(PeerLost("worker 1", "end of file"), "left 1.1 at 4 for PeerLost"), (GenerationOver("over"), "left 1.1 at 4")],
)
def test_a_broken_link_is_a_symptom_and_the_end_of_a_generation_is_none(error: Exception, told: str) -> None:
    notes = noted(generation(FIRST), endings=(error,), raises=JobEnded)
    assert notes[-1] == told
    assert notes.index("closed") < notes.index("flushed")


def test_a_generation_that_takes_us_to_be_elsewhere_is_left_before_it_begins() -> None:
    notes = noted(generation(FIRST, own=7, others=7), raises=JobEnded)
    assert notes == ["regroup at 4", "published 4", "flushed", "left 1.1 at 4"]


def test_who_is_done_in_a_generation_that_broke_meanwhile_reports_where_it_stands() -> None:
    notes = noted(generation(FIRST), endings=("complete",), digest="wrong", raises=JobEnded)
    assert notes[-1] == "left 1.1 at 5, saved"


def test_a_link_that_breaks_since_the_job_has_ended_is_no_symptom() -> None:
    broken = PeerLost("worker 1", "end of file")
    assert noted(generation(FIRST), endings=(broken,), has_ended=True, raises=LinkError)[-1] == "closed"
