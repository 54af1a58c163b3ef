"""Small things that a worker's view of its membership has to get right."""

import pytest

from quorate.core.generation import Cursor, Generation, GenerationId, Member
from quorate.core.timing import Timing
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import encode_generation, encode_id
from quorate.worker.heartbeats import Lease
from quorate.worker.membership_view import JobEnded, MembershipView

HERE = "127.0.0.1:5000"


class NothingComesError(Exception):
    """Raised by whoever has waited long enough."""


def generation(number: int) -> Generation:
    return Generation(GenerationId(1, number), (Member(0, HERE, range(2)),))


def formed(number: int) -> pb.Directive:
    return pb.Directive(formed=encode_generation(generation(number)))


def regroup(number: int, *, saves: bool) -> pb.Directive:
    id_ = encode_id(generation(number).id)
    return pb.Directive(regroup=pb.RegroupDirective(generation=id_, at_boundary=True, saves=saves))


def give_up() -> None:
    raise NothingComesError


@pytest.fixture
def view() -> MembershipView:
    view = MembershipView()
    view.join(0, 4711, HERE, Cursor(7))
    return view


def asked(view: MembershipView) -> tuple[bool, bool]:
    return view.break_requested, view.save_requested


def test_a_generation_ends_with_a_checkpoint_only_where_that_is_asked_for(view: MembershipView) -> None:
    assert asked(view) == (False, False)
    view.handle(formed(1))
    assert asked(view) == (False, False)
    view.handle(regroup(1, saves=False))
    assert asked(view) == (True, False)
    view.handle(regroup(1, saves=True))
    assert asked(view) == (True, True)
    view.handle(formed(2))
    assert asked(view) == (False, False), "the next is not asked"


def test_the_generation_that_was_left_is_not_the_next(view: MembershipView) -> None:
    view.handle(formed(1))
    first = view.await_generation(None, give_up, 1.0)
    with pytest.raises(NothingComesError):
        view.await_generation(first, give_up, 0.01)


def test_no_generation_begins_after_the_end(view: MembershipView) -> None:
    view.handle(formed(1))
    view.handle(pb.Directive(end=pb.EndDirective()))
    with pytest.raises(JobEnded):
        view.await_generation(None, give_up, 1.0)


def test_a_generation_that_is_told_again_is_not_entered_again(view: MembershipView) -> None:
    """All that was declared is told anew where the connection broke."""
    view.handle(formed(1))
    first = view.await_generation(None, give_up, 1.0)
    view.leave(Cursor(9))
    view.handle(formed(1))
    assert view.present(1).has_left
    with pytest.raises(NothingComesError):
        view.await_generation(first, give_up, 0.01)


@pytest.mark.parametrize(("worker", "pid"), [(1, 4711), (0, 4712)])
def test_who_has_another_place_or_had_ours_before_is_dismissed_without_us(
    view: MembershipView, worker: int, pid: int
) -> None:
    view.handle(pb.Directive(dismiss=pb.DismissDirective(worker=worker, pid=pid, incarnation=1)))
    with pytest.raises(NothingComesError):
        view.await_generation(None, give_up, 0.01)


@pytest.mark.parametrize(
    "directive",
    [
        pb.Directive(stop=pb.StopDirective(reason="interrupted")),
        regroup(1, saves=False),
        pb.Directive(save=pb.SaveDirective(generation=encode_id(generation(1).id), request="r")),
    ],
    ids=("stop", "regroup", "save"),
)
def test_a_view_knows_whether_anything_was_ever_asked_for(view: MembershipView, directive: pb.Directive) -> None:
    view.handle(formed(1))
    assert not view.is_asked
    view.handle(directive)
    assert view.is_asked


@pytest.mark.parametrize("directive", [pb.Directive(end=pb.EndDirective()), None], ids=("job", "generation"))
def test_links_are_closed_at_once_where_all_is_over_already(
    view: MembershipView, directive: pb.Directive | None
) -> None:
    view.handle(formed(1))
    closed: list[str] = []
    view.close_when_over(generation(1), lambda: closed.append("too early"))
    assert closed == []
    view.close_when_over(generation(1), lambda: None)
    over = pb.RegroupDirective(generation=encode_id(generation(1).id), at_boundary=False)
    view.handle(directive or pb.Directive(regroup=over))
    view.close_when_over(generation(1), lambda: closed.append("now"))
    assert closed == ["now"]


def test_an_answer_without_a_lease_is_not_an_answer() -> None:
    now = 100.0
    lease = Lease(Timing(5.0), lambda: now)
    lease.renew(100.0, 4.0)
    now = 106.0
    lease.renew(106.0, 0.0)
    assert "has not answered for 6.0 s" in lease.explain("a:1")
